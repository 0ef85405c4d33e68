"""Losses of classifiers against closed forms."""

import numpy as np

from constrainx.trainers import classification

LOGITS = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], np.float32)


def model(x):
    return x


def test_labels_are_classes_or_probabilities():
    logs = LOGITS - np.log(np.sum(np.exp(LOGITS), axis=1, keepdims=True))
    classes = np.array([0, 2])
    soft = np.array([[0.7, 0.3, 0.0], [0.1, 0.2, 0.7]], np.float32)
    hard = classification.cross_entropy(model, {"x": LOGITS, "y": classes})
    np.testing.assert_allclose(hard, [-logs[0, 0], -logs[1, 2]], rtol=1e-6)
    mixed = classification.cross_entropy(model, {"x": LOGITS, "y": soft})
    np.testing.assert_allclose(mixed, -np.sum(soft * logs, axis=1), rtol=1e-6)
    for labels in (classes, soft):
        wrong = classification.is_wrong(model, {"x": LOGITS, "y": labels})
        np.testing.assert_array_equal(wrong, [1, 0])
