"""Makes the files beside it: small models of PyTorch libraries, their inputs and their logits.

    pip install torch torchvision timm transformers safetensors
    python tests/models/published/make.py

Run it again only if a library changes its names. `test_published.py` reads the files without
PyTorch.
"""

import pathlib
import shutil

import numpy as np

HERE = pathlib.Path(__file__).parent


def make_all():
    import timm
    import torch
    import torchvision
    import transformers

    torch.manual_seed(0)
    sizes = {"depths": (2, 3), "num_heads": (1, 2), "window_size": 2}
    return {
        "swin-timm": timm.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=16,
            patch_size=2,
            embed_dim=4,
            num_classes=3,
            **sizes,
        ),
        "swin-torchvision": torchvision.models.SwinTransformer(
            patch_size=[2, 2],
            embed_dim=4,
            depths=[2, 3],
            num_heads=[1, 2],
            window_size=[2, 2],
            num_classes=3,
        ),
        "swin-transformers": transformers.SwinForImageClassification(
            transformers.SwinConfig(image_size=16, patch_size=2, embed_dim=4, num_labels=3, **sizes)
        ),
        "resnet-transformers": transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                layer_type="basic",
                depths=[1, 2],
                hidden_sizes=[4, 8],
                embedding_size=4,
                num_labels=3,
            )
        ),
    }


def shake(model) -> None:
    """Gives every array a value that matters: biases and statistics start at 0 and 1."""
    import torch

    for array in model.state_dict().values():
        if array.is_floating_point():
            array.add_(0.3 * torch.rand_like(array))


def main() -> None:
    import torch
    from safetensors.torch import save_file

    logits = {}
    image = torch.randn(2, 3, 16, 16)
    large = torch.randn(2, 3, 32, 32)
    for name, model in make_all().items():
        shake(model)
        model.eval()
        given = image if name.startswith("swin") else large
        with torch.no_grad():
            found = model(given)
        logits[name] = (found if torch.is_tensor(found) else found.logits).numpy()
        if name == "resnet-transformers":
            weights = {"model": model.state_dict(), "epoch": 3}
            torch.save(weights, HERE / f"{name}.pth")
            torch.save(weights, HERE / f"{name}-old.pth", _use_new_zipfile_serialization=False)
        elif name == "swin-transformers":
            # As the library publishes it, which differs from its names in memory.
            model.save_pretrained(HERE / name)
            (HERE / name / "model.safetensors").replace(HERE / f"{name}.safetensors")
            shutil.rmtree(HERE / name)
        else:
            save_file(model.state_dict(), HERE / f"{name}.safetensors")
    np.savez(HERE / "logits.npz", image=image.numpy(), large=large.numpy(), **logits)


if __name__ == "__main__":
    main()
