"""Published sizes against the libraries themselves, where PyTorch is installed."""

import jax
import numpy as np
import pytest
from flax import nnx

from constrainx.models import ResNet, Swin
from constrainx.models.published import load_weights, save_weights

torch = pytest.importorskip("torch")


def compare_logits(model, theirs, tmp_path, *, size, layout=None):
    """Loads weights from theirs, compares logits, and loads ours back into theirs."""
    torch.manual_seed(0)
    for array in theirs.state_dict().values():
        if array.is_floating_point():
            array.add_(0.02 * torch.rand_like(array))
    theirs.eval()
    path = tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), path)
    load_weights(model, path, layout=layout)
    model.eval()
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        found = theirs(images)
    expected = (found if torch.is_tensor(found) else found.logits).numpy()
    ours = jax.jit(lambda x: model(x))(np.moveaxis(images.numpy(), 1, -1))
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [224, 32])
def test_resnet18_of_timm(size, tmp_path):
    timm = pytest.importorskip("timm")
    model = ResNet(stem="imagenet", rngs=nnx.Rngs(0))
    compare_logits(model, timm.create_model("resnet18"), tmp_path, size=size)


def test_resnet18_of_torchvision_takes_weights_back(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    from safetensors.torch import load_file

    model, theirs = ResNet(stem="imagenet", rngs=nnx.Rngs(0)), torchvision.models.resnet18()
    compare_logits(model, theirs, tmp_path, size=64)
    save_weights(model, tmp_path / "back.safetensors", layout="torchvision")
    missing, unexpected = theirs.load_state_dict(
        load_file(tmp_path / "back.safetensors"), strict=False
    )
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)


def test_swin_tiny_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=1000))
    compare_logits(Swin.tiny(rngs=nnx.Rngs(0)), theirs, tmp_path, size=224)


def test_swin_small_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("swin_small_patch4_window7_224")
    compare_logits(Swin.small(scan=True, rngs=nnx.Rngs(0)), theirs, tmp_path, size=224)


def test_swin_tiny_of_torchvision(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    compare_logits(Swin.tiny(rngs=nnx.Rngs(0)), torchvision.models.swin_t(), tmp_path, size=224)
