"""Record what chapter 11 shows: `python -m kvlab.evaluation.windows stream | tasks`.

A stream that is far longer than the window, with and without sinks; and questions whose answer stands inside the
window, or outside. Each writes one file of rows under book/results. Note beside every figure: the weights of
smollm2-135m are already 4-bit, which are dequantised on load.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.cache.build import build_cache
from kvlab.evaluation.quality import Accuracy, accuracy, teacher_forced
from kvlab.evaluation.results import Results, record
from kvlab.evaluation.tasks import generate_samples
from kvlab.model import zoo
from kvlab.training.text import python_topics

COMMAND = "python -m kvlab.evaluation.windows"
MEASURES = {
    "stream": "negative log-likelihood along a stream that is longer than the window",
    "tasks": "right answers where the answer stands inside the window, and outside",
}
STREAMED = (
    "contiguous", "window-256", "sinks1-255", "sinks2-254", "sinks4-252", "sinks8-248", "sinks4-252-rerotated",
)  # fmt: skip
TOKENS, STRETCH, CHUNK = 4096, 256, 256
ASKED = ("contiguous", "window-256", "sinks4-252")
TASKS = {"recency": 512, "passkey": 512}  # tokens of a prompt


def stream_text(loaded: zoo.LoadedModel, tokens: int = TOKENS) -> tuple[list[int], dict]:
    """The first `tokens` + 1 tokens of what Python's help() says of its language, and where they come from.

    Raises ValueError for fewer than one token, or more than the text has.
    """
    if tokens < 1:
        raise ValueError(f"a stream holds at least one token, got {tokens}")
    corpus = python_topics()
    text = bytes(corpus.train[: 8 * (tokens + 1)].tolist()).decode(errors="ignore")  # a token has about 4 bytes
    ids = loaded.tokenizer.encode(text)[: tokens + 1]
    if len(ids) <= tokens:
        raise ValueError(f"the text is a stream of {len(ids) - 1:,} tokens at most, got {tokens:,}")
    return ids, {key: corpus.about[key] for key in ("source", "python", "sha256")}


def stream_rows(
    loaded: zoo.LoadedModel,
    ids: Sequence[int],
    names: Sequence[str] = STREAMED,
    *,
    stretch: int = STRETCH,
    chunk: int = CHUNK,
    work: Path | None = None,
    tick: Callable[[int], None] = lambda tokens: None,
) -> Iterator[dict]:
    """One row for each cache: the mean negative log-likelihood of every `stretch` tokens, and the bytes at the end.

    The tokens are fed `chunk` at a time. Windows and sinks are decided by position, so that changes nothing. The last
    id is predicted and not fed. `work` is a folder that keeps what was done; `tick` is called with tokens.
    """
    text = sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
    facts = {"measure": "stream", "model": loaded.config.name, "dtype": loaded.dtype, "tokens": len(ids) - 1,
             "stretch": stretch, "text": text}  # fmt: skip
    kept = Results(work and work / "stream.jsonl", facts)
    for name in names:
        if name not in kept.rows:
            kept.add({"id": name, "cache": name, **_streamed(loaded, ids, name, stretch, chunk, tick)})
        yield {key: value for key, value in kept.rows[name].items() if key != "id"}


def _streamed(loaded, ids: Sequence[int], name: str, stretch: int, chunk: int, tick: Callable[[int], None]) -> dict:
    cache, losses = build_cache(loaded.config, name), []
    for predicted in teacher_forced(loaded.model, ids[:-1], cache, chunk):  # (T, vocabulary) log-probabilities
        seen = sum(map(len, losses))
        targets = torch.tensor(ids[seen + 1 : seen + 1 + len(predicted)], device=predicted.device)[:, None]  # (T, 1)
        losses.append(-predicted.gather(1, targets)[:, 0])
        tick(len(predicted))
    means = [float(piece.double().mean()) for piece in torch.cat(losses).split(stretch)]
    held = cache.bytes()
    return {"nll": [round(mean, 5) for mean in means], "payload_bytes": held.payload, "total_bytes": held.total}


def task_rows(
    loaded: zoo.LoadedModel,
    *,
    samples: int = 20,
    seed: int = 1,
    tasks: dict[str, int] = TASKS,
    names: Sequence[str] = ASKED,
    work: Path | None = None,
    tick: Callable[[dict], None] = lambda row: None,
) -> Iterator[dict]:
    """One row for each task and cache: right answers with their interval, in all and for each depth of the answer."""
    for task, tokens in tasks.items():
        asked = list(generate_samples(task, loaded.tokenizer, samples, seed=seed, tokens=tokens))
        for name in names:
            facts = {"model": loaded.config.name, "dtype": loaded.dtype, "cache": name}
            found = accuracy(
                loaded.model, loaded.tokenizer, asked, lambda capacity, name=name: build_cache(loaded.config, name),
                results=work and work / f"{task}-{name}.jsonl", configuration=facts, tick=tick,
            )  # fmt: skip
            yield {"task": task, "tokens": tokens, "cache": name, "right": found.right, "total": found.total,
                   "low": round(found.low, 4), "high": round(found.high, 4), "by_depth": _by_depth(found)}  # fmt: skip


def _by_depth(found: Accuracy) -> dict[str, list[int]]:
    """For each depth: right, total."""
    counts: dict[str, list[int]] = {}
    for row in found.rows:
        count = counts.setdefault(str(row["depth"]), [0, 0])
        count[0], count[1] = count[0] + row["right"], count[1] + 1
    return dict(sorted(counts.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure SmolLM2 with windows and sinks and record the rows; a run that broke off continues."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("measure", choices=MEASURES, help="; ".join(f"{k}: {v}" for k, v in MEASURES.items()))
    parser.add_argument("--out", type=Path, help="[book/results/windows-MEASURE.json]")
    parser.add_argument("--work", type=Path, default=Path("_build/windows"), help="a folder for rows so far")
    parser.add_argument("--model", default=zoo.OFFLINE)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the stream")
    parser.add_argument("--samples", type=int, default=20, help="of each task")
    given = parser.parse_args(arguments)
    out = given.out or Path("book/results") / f"windows-{given.measure}.json"
    for folder in (out.parent, given.work):
        folder.mkdir(parents=True, exist_ok=True)
    loaded = zoo.load(given.model, dtype=given.dtype)
    facts = {"model": loaded.config.name, "dtype": loaded.dtype, "note": loaded.words}
    if given.measure == "stream":
        ids, text = stream_text(loaded, given.tokens)
        with tqdm(unit="token", total=given.tokens * len(STREAMED)) as bar:
            rows = list(stream_rows(loaded, ids, STREAMED, work=given.work, tick=bar.update))
        facts |= {"text": text, "tokens": given.tokens, "stretch": STRETCH}
    else:
        with tqdm(unit="answer") as bar:
            rows = list(task_rows(loaded, samples=given.samples, work=given.work, tick=lambda row: bar.update()))
    record(out, f"{COMMAND} {given.measure}", rows, measure=MEASURES[given.measure], **facts)


if __name__ == "__main__":
    main()
