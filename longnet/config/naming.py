"""Names of runs: in a sweep, each job's name tells it from the others."""

from __future__ import annotations

import hashlib
import re

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

# A name is one directory in run.root, whatever the file system.
RUN_NAME = re.compile(r"\w[\w.=+,@-]*")
LONGEST_NAME = 200


def is_sweeping() -> bool:
    """Whether this is a job of a Hydra sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_run_name(name: str) -> bool:
    """Whether a directory of that name can hold a run."""
    return RUN_NAME.fullmatch(name) is not None and len(name.encode()) <= LONGEST_NAME


def as_run_name(text: str) -> str:
    """The text with everything taken out that a run's name may not have."""
    return re.sub(r"[^\w.=+,@-]+", "-", text).strip("-.=+,@")[: LONGEST_NAME // 4]


def sweep_name(name: str) -> str:
    """The name of this job: `name` itself, and in a sweep what the sweep varies behind it.

    `tiny-dense-stdlib` stays as it is for `attention=dense`, which it already tells; `optim.lr=0.001` becomes
    `tiny-dense-stdlib-lr=0.001`.
    """
    if not is_sweeping():
        return name
    hydra = HydraConfig.get()
    fixed = set(hydra.job.config.override_dirname.exclude_keys)
    overrides = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    swept = [(o.key_or_group, o.get_value_string()) for o in overrides if o.key_or_group not in fixed]
    return with_swept(name, swept, set(hydra.runtime.choices))


def with_swept(name: str, swept: list[tuple[str, str]], groups: set[str]) -> str:
    """`name` with the swept (key, value) pairs that it does not tell yet."""
    told = name.split("-")
    last = [key.rpartition(".")[2] for key, _ in swept]
    parts, lossy = [], False
    for key, value in swept:
        if key == "run.name" or (key in groups and value in told):
            continue
        short = key.rpartition(".")[2]
        short = short if last.count(short) == 1 else key
        clean = re.sub(r"[^\w.=+-]+", "_", value.strip("[]{}'\" ")).strip("_")
        lossy |= clean != re.sub(r"[\[\], ]+", "_", value).strip("_")
        parts.append(clean if key in groups else f"{short.replace('/', '.')}={clean}")
    full = "-".join([name, *parts])
    whole = full.encode(errors="ignore")
    if lossy or len(whole) > LONGEST_NAME:
        digest = hashlib.sha256(repr(swept).encode(errors="ignore")).hexdigest()[:8]
        full = f"{whole[: LONGEST_NAME - 9].decode(errors='ignore')}-{digest}"
    return full
