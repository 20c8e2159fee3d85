"""Least squares over what came true: how much each feature weighs, forgetting over a week. Pure and of fixed size.

The normal equations are kept instead of samples. The ridge is relative to each feature's own size, so the result does not
depend on the unit, and pulls towards the prior: few samples change it little.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec

from agent.advisor.forecast.window import PRIOR

SIZE = len(PRIOR)
DECAY = 1 - 1 / 2016
"""Of a sample's weight, a bucket later: half is left after five days."""
PRIOR_SAMPLES = 4.0
"""The prior counts like so many samples."""
_PAIRS = tuple((i, j) for i in range(SIZE) for j in range(i + 1))


class Regression(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of products, and the weights that follow from them."""

    samples: float = 0.0
    gram: tuple[float, ...] = (0.0,) * len(_PAIRS)
    """Lower triangle, row by row."""
    moments: tuple[float, ...] = (0.0,) * SIZE
    weights: tuple[float, ...] = PRIOR


def value(regression: Regression, features: Sequence[float]) -> float:
    """The expected peak, in the unit of the features."""
    return sum(weight * feature for weight, feature in zip(regression.weights, features, strict=True))


def learn(regression: Regression, features: Sequence[float], actual: float) -> Regression:
    """The regression with one more sample in it."""
    gram = tuple(DECAY * old + features[i] * features[j] for old, (i, j) in zip(regression.gram, _PAIRS, strict=True))
    moments = tuple(DECAY * old + actual * x for old, x in zip(regression.moments, features, strict=True))
    samples = DECAY * regression.samples + 1
    return Regression(samples=samples, gram=gram, moments=moments, weights=_weights(gram, moments, samples))


def _weights(gram: Sequence[float], moments: Sequence[float], samples: float) -> tuple[float, ...]:
    """Solve (S G S + r I) u = S m + r S^-1 prior for weights S u, S being one over the roots of G's diagonal."""
    diagonal = [gram[i * (i + 1) // 2 + i] for i in range(SIZE)]
    scale = [1 / sqrt(entry) if entry > 0 else 1.0 for entry in diagonal]
    ridge = PRIOR_SAMPLES / samples
    matrix = [[0.0] * SIZE for _ in range(SIZE)]
    for entry, (i, j) in zip(gram, _PAIRS, strict=True):
        matrix[i][j] = entry * scale[i] * scale[j] + (ridge if i == j else 0.0)
    right = [m * s + ridge * prior / s for m, s, prior in zip(moments, scale, PRIOR, strict=True)]
    return tuple(u * s for u, s in zip(_cholesky_solve(matrix, right), scale, strict=True))


def _cholesky_solve(lower: list[list[float]], right: list[float]) -> list[float]:
    # The ridge keeps the matrix positive definite: every pivot is at least as large as it, but for rounding.
    for i, row in enumerate(lower):
        for j in range(i):
            other = lower[j]
            row[j] = (row[j] - sum(row[k] * other[k] for k in range(j))) / other[j]
        row[i] = sqrt(max(row[i] - sum(row[k] * row[k] for k in range(i)), 1e-12))
        right[i] = (right[i] - sum(row[k] * right[k] for k in range(i))) / row[i]
    for i in range(SIZE - 1, -1, -1):
        right[i] = (right[i] - sum(lower[k][i] * right[k] for k in range(i + 1, SIZE))) / lower[i][i]
    return right
