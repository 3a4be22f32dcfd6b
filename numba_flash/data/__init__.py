"""The bundled real input; where it comes from stands in ``README.md`` beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One attention layer of a trained sentence encoder, reading one English paragraph.

    The layer is the second of all-MiniLM-L6-v2: 12 heads of 32 numbers, no mask, scores scaled
    by 1/sqrt(32).

    Attributes
    ----------
    q, k, v : ndarray, float32, (1, 12, 79, 32)
        What the layer's attention takes in, as (batch, heads, seqlen, head_dim).
    o : ndarray, float32, (1, 12, 79, 32)
        What the model itself made of it, before the output projection.
    tokens : tuple of str
        The 79 word pieces, ``[CLS]`` first and ``[SEP]`` last.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    tokens: tuple[str, ...]


def load_sample() -> Sample:
    """Real queries, keys and values, with the model's own attention output.

    Returns
    -------
    Sample
        Fresh arrays at every call: change them as you like.

    Examples
    --------
    >>> sample = load_sample()
    >>> sample.q.shape, sample.tokens[1:4]
    ((1, 12, 79, 32), ('a', 'library', 'is'))
    """
    with (files(__name__) / "minilm_layer.npz").open("rb") as stream, np.load(stream) as arrays:
        q, k, v, o = (arrays[name] for name in ("q", "k", "v", "o"))
        return Sample(q, k, v, o, tuple(arrays["tokens"].tolist()))
