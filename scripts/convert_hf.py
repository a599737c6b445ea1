"""Makes a LongNet of a dense checkpoint, and hands it back.

    python scripts/convert_hf.py import source=DIR target=OUT segment_lengths=[2048,8192] dilation_rates=[1,4]
    python scripts/convert_hf.py import source=model.gguf target=OUT       with its own, dense attention
    python scripts/convert_hf.py export source=OUT target=BACK             as its original family where it can be

Imports Llama, Mistral, Qwen 2, Qwen 3, SmolLM, SmolLM 2 and SmolLM 3, from safetensors or GGUF; nothing in a checkpoint
is executed. An export loads in plain transformers if the pattern is one level of dilation rate 1 that holds the whole
context, else after `import longnet`. source may also be a run's directory, runs/NAME.

source, target: directories (or a .gguf file).  dtype: of the weights; null keeps them.
import: segment_lengths, dilation_rates: the pattern; null keeps the model's own attention.  heads, shift: of the
    pattern; null is all and 0.
    context: the context the model is made for; null keeps its own.  rope: keep, linear, ntk, dynamic or yarn, by which
    positions are extended to it, or base.  theta: the new base of RoPE, with rope=base.
export: dense: true insists on the original family, false on a LongNet, null takes the first that is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longnet.config.arguments import parse_arguments, script
from longnet.config.errors import ConfigError

SCALED = ("linear", "ntk", "dynamic", "yarn")


@dataclass
class ImportOptions:
    source: str = ""
    target: str = ""
    segment_lengths: list[int] | None = None
    dilation_rates: list[int] | None = None
    heads: Literal["all", "grouped"] | None = None
    shift: int | None = None
    context: int | None = None
    rope: Literal["keep", "linear", "ntk", "dynamic", "yarn", "base"] = "keep"
    theta: float | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


@dataclass
class ExportOptions:
    source: str = ""
    target: str = ""
    dense: bool | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


def check(options: ImportOptions | ExportOptions) -> Path:
    """The checkpoint, after a look at what can be known without torch."""
    problems = [f"{key}: has no value; give one by {key}=DIR" for key in ("source", "target") if not vars(options)[key]]
    source, target = Path(options.source), Path(options.target)
    if (source / "model" / "config.json").is_file():
        source = source / "model"
    if options.source and not source.exists():
        problems.append(f"source={options.source!r}: no such file or directory")
    if options.target and target.exists() and (target.is_file() or any(target.iterdir())):
        problems.append(f"target={options.target!r}: it is there and not empty; expected a new directory")
    if isinstance(options, ImportOptions):
        problems += ignored(options)
    if problems:
        raise ConfigError(problems)
    return source


def ignored(options: ImportOptions) -> list[str]:
    """What is wrong with options that others would leave without an effect."""
    problems = []
    if options.theta is not None and options.rope != "base":
        problems.append(f"theta={options.theta}: rope={options.rope} takes none; expected rope=base with it")
    parts = [f"{key}={vars(options)[key]}" for key in ("heads", "shift") if vars(options)[key] is not None]
    if parts and options.segment_lengths is None and options.dilation_rates is None:
        given = ", ".join(parts)
        problems.append(f"{given}: parts of a pattern; expected segment_lengths and dilation_rates with them")
    if options.context is not None and options.context < 1:
        problems.append(f"context={options.context}: expected at least 1, or null for the model's own")
    if options.context is None and options.rope in SCALED:
        problems.append(
            f"rope={options.rope}: extends a context; expected one with it, longer than the model's own, or rope=keep"
        )
    return problems


def convert(source: Path, options: ImportOptions) -> None:
    import torch

    from longnet.model.hf import export_checkpoint, import_checkpoint, read_config
    from longnet.model.hf.convert import find_tokenizer
    from longnet.model.rope_extension import extend_rope

    changes: dict[str, Any] = {}
    if options.context is not None or options.rope != "keep":
        config = read_config(source)
        own = config.max_position_embeddings
        context = own if options.context is None else options.context
        if options.rope in SCALED and context == own:
            raise ConfigError(
                [f"context={context}: rope={options.rope} extends a context; expected more than the model's own {own}"]
            )
        changes = extend_rope(config, options.rope, context, options.theta)
    model = import_checkpoint(
        source,
        options.segment_lengths,
        options.dilation_rates,
        heads=options.heads,
        shift=options.shift,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        **changes,
    )
    export_checkpoint(model, options.target, find_tokenizer(source), dense=False)
    print(f"{options.target}: {model.num_parameters():,} parameters, attention {model.config.attention}")
    print(f"next  python scripts/generate.py model={options.target} prompt='Once upon a time'")


def hand_back(source: Path, options: ExportOptions) -> None:
    import torch

    from longnet.model.hf import export_checkpoint, import_checkpoint
    from longnet.model.hf.convert import find_tokenizer

    dtype = getattr(torch, options.dtype) if options.dtype else None
    model = import_checkpoint(source, dtype=dtype)
    written = export_checkpoint(model, options.target, find_tokenizer(source), options.dense)
    how = "import longnet first" if written == "longnet" else "plain transformers loads it"
    print(f"{options.target}: model_type {written}, {how}")


@script
def main(words: list[str]) -> None:
    """Runs the command."""
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command == "export":
        exporting = parse_arguments(ExportOptions, rest, __doc__ or "")
        hand_back(check(exporting), exporting)
    elif command == "import":
        importing = parse_arguments(ImportOptions, rest, __doc__ or "")
        convert(check(importing), importing)
    else:
        parse_arguments(ImportOptions, [word for word in words if word in ("-h", "--help")], __doc__ or "")
        raise ConfigError([f"{command or 'the command'}: expected import or export; --help says more"])


if __name__ == "__main__":
    main()
