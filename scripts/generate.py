"""Continues a text with a trained model, and streams what it writes.

    python scripts/generate.py run=runs/NAME prompt="def "           a run that train.py has finished
    python scripts/generate.py model=DIR file=book.txt               a checkpoint: a LongNet's, a Llama's, ..., a .gguf
    cat book.txt | python scripts/generate.py model=DIR file=-       from standard input

A prompt of any length is read piece by piece, in memory that the pattern bounds; a step costs the same however long it
was. The text goes to standard output; speed and the cache's size to standard error.

run, model: what to continue with, one of the two.  prompt, file: what to continue, one of the two.
max_new_tokens: the most to write.  temperature: 0 takes the likeliest token.  top_k, top_p: draw from fewer tokens.
seed: the same draws every time; null differs.  chat: wrap the prompt as the model's chat template does.
echo: write the prompt too.  device: auto, cpu, gpu, mps.  precision: auto, fp32, bf16, fp16.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longnet.config.arguments import parse_arguments, script
from longnet.config.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, TextStreamer

    from longnet.model import LongNetForCausalLM


@dataclass
class Options:
    run: str | None = None
    model: str | None = None
    prompt: str | None = None
    file: str | None = None
    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 1337
    chat: bool = False
    echo: bool = True
    device: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"


def check(options: Options) -> Path:
    """The checkpoint, after a look at everything that can be known without torch."""
    problems = []
    if (options.run is None) == (options.model is None):
        problems.append("run and model: expected one of the two, for example run=runs/tiny-dilated-stdlib")
    if (options.prompt is None) == (options.file is None):
        problems.append("prompt and file: expected one of the two, for example prompt='def '; file=- reads from a pipe")
    if options.file not in (None, "-") and not Path(options.file).is_file():
        problems.append(f"file={options.file!r}: no such file")
    if options.max_new_tokens < 1:
        problems.append(f"max_new_tokens={options.max_new_tokens}: expected at least 1; the nearest is 1")
    if options.temperature < 0:
        problems.append(f"temperature={options.temperature}: expected at least 0, which takes the likeliest token")
    if options.top_k < 0:
        problems.append(f"top_k={options.top_k}: expected at least 0, which is all")
    if not 0 < options.top_p <= 1:
        problems.append(f"top_p={options.top_p}: expected above 0 and at most 1, which is all")
    checkpoint = Path(options.model) if options.model else Path(options.run or "") / "model"
    if options.run and not Path(options.run).is_dir():
        problems.append(f"run={options.run!r}: no such directory; expected a run's, for example runs/NAME")
    elif options.run and not (checkpoint / "config.json").is_file():
        problems.append(f"run={options.run!r}: it has no model yet; expected a finished run, the same command goes on")
    elif options.model and not checkpoint.exists():
        problems.append(f"model={options.model!r}: no such file or directory; expected a checkpoint's")
    if problems:
        raise ConfigError(problems)
    return checkpoint


def load(checkpoint: Path, options: Options) -> tuple[LongNetForCausalLM, PreTrainedTokenizerBase]:
    import torch

    from longnet.model.hf import load_checkpoint

    kinds = {"gpu": "cuda", "cpu": "cpu", "mps": "mps", "auto": "cuda" if torch.cuda.is_available() else "cpu"}
    device = kinds[options.device]
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["device=gpu: torch sees no GPU; expected device=cpu or auto"])
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(["device=mps: torch sees none; expected device=cpu or auto"])
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes.get(options.precision, torch.bfloat16 if device == "cuda" else torch.float32)
    model, tokenizer = load_checkpoint(checkpoint, dtype=dtype)
    model.to(torch.device(device))  # type: ignore[arg-type]
    return model, tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, options: Options) -> torch.Tensor:
    import torch

    if options.file == "-":
        text = sys.stdin.read()
    else:
        text = Path(options.file).read_text(errors="replace") if options.file else options.prompt or ""
    if options.chat:
        if tokenizer.chat_template is None:
            raise ConfigError(["chat=true: the model's tokenizer has no chat template; expected chat=false"])
        encoded: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
    else:
        encoded = tokenizer(text).input_ids
        # Some tokenizers end every text; one that is to be continued has not ended.
        while encoded and encoded[-1] == tokenizer.eos_token_id:
            encoded.pop()
    if not encoded:
        raise ConfigError(["prompt is empty: expected a character or more"])
    return torch.tensor([encoded])


def echo(tokenizer: PreTrainedTokenizerBase, streamer: TextStreamer, ids: list[int]) -> None:
    """Writes the prompt, and has the streamer go on behind it.

    The streamer decodes all that it holds for every token, so it gets no more of the prompt than it needs: the last
    tokens, since many tokenizers leave out the space before the first word that they decode.
    """
    text: Any = tokenizer.decode(ids, skip_special_tokens=True)
    print(text, end="", flush=True)
    # A character is four tokens at most, and is not to be cut.
    for size in range(8, 12):
        streamer.token_cache = ids[-size:]
        held: Any = tokenizer.decode(streamer.token_cache, skip_special_tokens=True)
        streamer.print_len = len(held)
        if text.endswith(held):
            break


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    options = parse_arguments(Options, words, __doc__ or "")
    checkpoint = check(options)

    # torch and transformers take seconds to import: only for a command that can run.
    import torch
    from transformers import TextStreamer
    from transformers.utils import logging

    from longnet.model import LongNetCache
    from longnet.model.generation import stream

    logging.disable_progress_bar()
    # It would warn of errors behind the context, where a LongNet has none.
    logging.set_verbosity_error()
    model, tokenizer = load(checkpoint, options)
    ids = encode(tokenizer, options).to(model.device)
    if ids.shape[1] > (context := model.config.max_position_embeddings):
        print(f"the prompt has {ids.shape[1]:,} tokens; the model was made for {context:,}", file=sys.stderr)
    cache = LongNetCache(model.config)
    streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True)
    if options.echo:
        echo(tokenizer, streamer, ids[0].tolist())
    ends = model.generation_config.eos_token_id
    started = time.perf_counter()
    written, first = 0, started
    for token in stream(
        model, ids, cache, options.max_new_tokens, temperature=options.temperature, top_k=options.top_k,
        top_p=options.top_p, stop=ends if isinstance(ends, list) else [ends], seed=options.seed,
    ):  # fmt: skip
        # The token is on the host, so the device has finished it.
        written += 1
        first = time.perf_counter() if written == 1 else first
        streamer.put(torch.tensor([token]))
    streamer.end()
    seconds = time.perf_counter() - first
    rate = f", {(written - 1) / seconds:.1f} tokens/s" if written > 1 else ""
    print(
        f"prompt  {ids.shape[1]:,} tokens, {ids.shape[1] / (first - started):,.0f} tokens/s\n"
        f"text    {written:,} tokens{rate}\n"
        f"cache   {cache.num_bytes:,} bytes after {cache.columns:,} tokens",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
