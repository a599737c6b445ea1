"""The commands that convert a checkpoint and continue a text, from end to end."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, ByT5Tokenizer, PreTrainedTokenizerFast, TextStreamer

from longnet.model import LongNetCache, LongNetForCausalLM
from longnet.model.generation import stream
from tests.model.hf.originals import original
from tests.model.models import small_model, some_tokens

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process: starting another one takes seconds."""

    def call(script: str, *words: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", [script, *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "llama"
    original("llama", vocab_size=384).save_pretrained(path)
    ByT5Tokenizer().save_pretrained(path)
    return path


def test_a_checkpoint_goes_in_writes_and_comes_back(llama: Path, tmp_path: Path, run: Run) -> None:
    pattern = ("segment_lengths=[8,32]", "dilation_rates=[1,2]", "context=256", "rope=yarn")
    done = run("convert_hf.py", "import", f"source={llama}", f"target={tmp_path / 'in'}", *pattern)
    assert done.returncode == 0, done.stderr
    ours = LongNetForCausalLM.from_pretrained(tmp_path / "in")
    assert ours.config.attention[0]["segment_lengths"] == [8, 32]
    assert ours.config.rope_parameters["factor"] == 4.0

    options = ("file=-", "temperature=0", "max_new_tokens=20", "echo=false", "device=cpu")
    done = run("generate.py", f"model={tmp_path / 'in'}", *options, stdin="a prompt: yes=no\n")
    assert done.returncode == 0, done.stderr
    tokenizer = ByT5Tokenizer()
    ids = torch.tensor([tokenizer("a prompt: yes=no\n", add_special_tokens=False).input_ids])
    written = ours.generate(ids, max_new_tokens=20)[0, ids.shape[1] :]
    assert done.stdout.strip() == tokenizer.decode(written, skip_special_tokens=True).strip()
    assert f"prompt  {ids.shape[1]} tokens" in done.stderr
    assert "bytes after" in done.stderr

    done = run("convert_hf.py", "export", f"source={llama}", f"target={tmp_path / 'out'}", "dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert "plain transformers loads it" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_prompts_that_are_empty_too_long_or_no_chat(llama: Path, run: Run) -> None:
    common = (f"model={llama}", "file=-", "max_new_tokens=2", "temperature=0", "echo=false", "device=cpu")
    done = run("generate.py", *common, stdin="x" * 100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "the prompt has 100 tokens; the model was made for 64"
    assert "extra_id" not in done.stdout
    done = run("generate.py", *common)
    assert (done.returncode, done.stderr.splitlines()[1]) == (2, "  prompt is empty: expected a character or more")
    done = run("generate.py", *common, "chat=true", stdin="x")
    assert "chat=true: the model's tokenizer has no chat template" in done.stderr


def test_bad_command_lines_get_all_their_faults_at_once(tmp_path: Path, run: Run) -> None:
    done = run("generate.py", "modle=x", "temperature=-1", "top_p=2", "max_new_tokens=few", "prompt", f"run={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "3 problems in the configuration:"
    assert "modle: unknown key; did you mean model?" in done.stderr
    done = run("generate.py", f"run={tmp_path}", "temperature=-1", "top_p=2", "file=missing")
    assert done.stderr.splitlines()[0] == "4 problems in the configuration:"
    assert "it has no model yet" in done.stderr
    done = run("convert_hf.py", "improt")
    assert "improt: expected import or export" in done.stderr
    done = run("convert_hf.py", "import", f"source={tmp_path / 'none'}")
    assert "source=" in done.stderr
    assert "target: has no value" in done.stderr
    assert not list(tmp_path.iterdir())


def test_options_that_would_be_ignored_are_refused(llama: Path, tmp_path: Path, run: Run) -> None:
    common = ("convert_hf.py", "import", f"source={llama}", f"target={tmp_path / 'out'}")
    done = run(*common, "theta=1e6", "rope=yarn", "heads=grouped", "shift=5")
    assert done.stderr.splitlines() == [
        "3 problems in the configuration:",
        "  theta=1000000.0: rope=yarn takes none; expected rope=base with it",
        "  heads=grouped, shift=5: parts of a pattern; expected segment_lengths and dilation_rates with them",
        "  rope=yarn: extends a context; expected one with it, longer than the model's own, or rope=keep",
    ]
    assert "context=0: expected at least 1" in run(*common, "context=0").stderr
    done = run(*common, "context=64", "rope=linear")
    assert "context=64: rope=linear extends a context; expected more than the model's own 64" in done.stderr
    assert not list(tmp_path.iterdir())
    assert run(*common, "theta=1e6", "rope=base").returncode == 0
    assert LongNetForCausalLM.from_pretrained(tmp_path / "out").config.rope_parameters["rope_theta"] == 1e6


def test_a_step_does_not_decode_the_prompt_again(llama: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    decode = ByT5Tokenizer.decode

    def counted(self: ByT5Tokenizer, ids: Any, **options: Any) -> Any:
        sizes.append(len(ids))
        return decode(self, ids, **options)

    common = (f"model={llama}", "file=-", "max_new_tokens=5", "temperature=0", "device=cpu")
    alone = run("generate.py", *common, "echo=false", stdin="a b" * 20)
    monkeypatch.setattr(ByT5Tokenizer, "decode", counted)
    done = run("generate.py", *common, stdin="a b" * 20)
    assert done.stdout == "a b" * 20 + alone.stdout
    assert sizes.count(60) == 1
    assert max(size for size in sizes if size != 60) < 20


def test_the_first_word_behind_an_echo_keeps_its_space(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581one", "\u2581two"]
    inner = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    echo = runpy.run_path(str(ROOT / "scripts" / "generate.py"))["echo"]
    # A character of four bytes, whose bytes decode together or not at all, over every place where the prompt is cut.
    for length in range(1, 20):
        prompt = [257] + [byte + 1 for byte in "\U0001f600".encode()] + [258] * length
        emoji = [257] + [byte + 1 for byte in ("\U0001f600" * length).encode()]
        for ids in (prompt, emoji):
            streamer = TextStreamer(tokenizer, skip_special_tokens=True)
            echo(tokenizer, streamer, ids)
            for token in (258, *(byte + 1 for byte in "\u00e9".encode()), 257):
                streamer.put(torch.tensor([token]))
            streamer.end()
            assert capsys.readouterr().out == tokenizer.decode(ids) + " two\u00e9 one\n"


def test_a_device_that_is_not_there_has_a_message(llama: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    done = run("generate.py", f"model={llama}", "prompt=a", "device=mps")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == ["  device=mps: torch sees none; expected device=cpu or auto"]


def test_reading_is_measured(tmp_path: Path, run: Run) -> None:
    shape = ("hidden_size=16", "layers=1", "heads=2", "kv_heads=1", "intermediate_size=16", "base=64")
    stream = ("tokens=1e3", "piece=128", "report=2", "decode_tokens=3", f"output={tmp_path / 'reading'}")
    done = run("benchmark_reading.py", *shape, *stream)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "reading.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["tokens", "256", "512", "768", "1000"]
    assert (tmp_path / "reading.png").exists()
    assert "w/r 64/1, 256/4, 1024/16" in done.stderr


def test_help_says_what_the_keys_are(run: Run) -> None:
    done = run("generate.py", "--help")
    assert done.returncode == 0
    assert "temperature=0.8" in done.stdout


def test_streaming_is_generation() -> None:
    model = small_model().double()
    prompt = some_tokens(1, 9)
    expected = model.generate(prompt, max_new_tokens=26)[0, 9:].tolist()
    cache = LongNetCache(model.config)
    assert list(stream(model, prompt, cache, 26)) == expected
    assert cache.columns == 9 + 25
    # The last token was not read yet; with it, the same cache goes on.
    longer = model.generate(prompt, max_new_tokens=40)[0, 35:].tolist()
    assert list(stream(model, torch.tensor([expected[-1:]]), cache, 14)) == longer
    assert list(stream(model, prompt, LongNetCache(model.config), 26, stop=[expected[3]])) == expected[:4]
    drawn = [
        list(stream(model, prompt, LongNetCache(model.config), 26, temperature=t, top_k=5, top_p=0.9, seed=1))
        for t in (0.7, 0.7, 1.0)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert list(stream(model, prompt, LongNetCache(model.config), 26, temperature=0.5, top_k=1, seed=2)) == expected


def test_streaming_says_what_does_not_fit() -> None:
    model = small_model(position_embedding="xpos")
    with pytest.raises(ValueError, match=r"input_ids has shape \(2, 40\): expected one row"):
        next(stream(model, some_tokens(), LongNetCache(model.config), 1))
    with pytest.raises(ValueError, match=r"max_new_tokens=30 behind 40 tokens: xPos .*expected at most 24"):
        next(stream(model, some_tokens(1), LongNetCache(model.config), 30))
