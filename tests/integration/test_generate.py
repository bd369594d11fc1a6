"""`outrider generate`: its output equals that of the engine."""

from __future__ import annotations

import json
import re

import pytest

import tiny_lora
import tiny_modules
from outrider import LLM, SamplingParams
from outrider.speculation.auto import choose

STATS = {"method", "steps", "drafted", "accepted", "mean_acceptance_length", "acceptance_rates", "widths", "drafters"}
STATS |= {"seconds", "tokens_per_second", "tokens_per_step", "suspended", "suspension"}
TWO_TOKENS = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "standard"}
SUMMARY = r"\d+\.\d tokens per step with (\w+): drafted (\d+), accepted (\d+); by depth( \d+%){1,8}( \.\.\.)?\n"


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model))


def lines(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_output_has_all_fields(outrider, model, llm) -> None:
    common = ("-m", model, "--max-tokens", 6, "--ignore-eos", "--json")
    (found,) = lines(outrider("generate", "hello", *common, "--speculate", "none"))
    assert found["prompt"] == "hello"
    assert found["finish_reason"] == "length"
    assert len(found["token_ids"]) == 6
    assert found["text"] == llm.tokenizer.decode(found["token_ids"])
    assert found["stats"].keys() >= STATS
    assert found["stats"]["steps"] == 6
    assert (found["stats"]["drafted"], found["stats"]["accepted"]) == (0, 0)
    assert found["stats"]["mean_acceptance_length"] == 1
    assert (found["stats"]["method"], found["stats"]["acceptance_rates"]) == ("none", [])
    assert found["stats"]["seconds"] > 0 and found["stats"]["tokens_per_second"] > 0


def test_the_chat_template_applies_unless_raw(outrider, model, llm) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    common = ("-m", model, "--max-tokens", 12, "--ignore-eos", "--json")
    templated = llm.chat([{"role": "user", "content": "hello"}], params).completions[0]
    with_system = llm.chat(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], params
    ).completions[0]
    plain = llm.generate(["hello"], params)[0].completions[0]
    assert templated.token_ids != plain.token_ids != with_system.token_ids
    assert lines(outrider("generate", "hello", *common))[0]["token_ids"] == templated.token_ids
    assert (
        lines(outrider("generate", "hello", "--system", "be brief", *common))[0]["token_ids"] == with_system.token_ids
    )
    for flag in ("--raw", "--no-chat"):
        assert lines(outrider("generate", "hello", flag, *common))[0]["token_ids"] == plain.token_ids


def test_a_model_without_chat_template_completes_the_prompt(outrider, plain_model) -> None:
    common = ("-m", plain_model, "--max-tokens", 8, "--ignore-eos", "--json")
    bare, raw = (lines(outrider("generate", "hello", *extra, *common)) for extra in ((), ("--raw",)))
    assert bare[0]["token_ids"] == raw[0]["token_ids"]


def test_text_streams_to_stdout_and_speed_to_stderr(outrider, model) -> None:
    common = ("generate", "hello", "-m", model, "--max-tokens", 20, "--ignore-eos", "--speculate", "none")
    found = outrider(*common)
    (body,) = lines(outrider(*common, "--json"))
    assert found.stdout == body["text"] + "\n"
    assert re.fullmatch(
        r"20 tokens in \d+\.\d+ s: \d+\.\d tokens/s, the first after \d+ ms, "
        r"\d+% of the memory bandwidth \(\d+\.\d GB/s\)\n",
        found.stderr,
    )


def test_several_prompts_are_printed_with_their_outputs(outrider, model) -> None:
    common = ("-m", model, "--max-tokens", 5, "--ignore-eos", "--speculate", "none")
    found = outrider("generate", "one", "two", *common)
    answers = [line["text"].strip() for line in lines(outrider("generate", "one", "two", *common, "--json"))]
    assert found.stdout == f"one\n{answers[0]}\n\ntwo\n{answers[1]}\n\n"
    assert found.stderr.startswith("10 tokens in ")


def test_prompts_are_read_from_a_file(outrider, model, tmp_path) -> None:
    messages = [{"role": "user", "content": "three"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'one\n\n{{"prompt": "two", "id": 7}}\n{json.dumps({"messages": messages})}\n')
    common = ("-m", model, "--max-tokens", 5, "--ignore-eos", "--json")
    found = lines(outrider("generate", "zero", "--file", file, *common))
    assert [line["prompt"] for line in found] == ["zero", "one", "two", None]
    assert found[3]["messages"] == messages
    alone = [lines(outrider("generate", prompt, *common))[0]["token_ids"] for prompt in ("zero", "one", "two", "three")]
    assert [line["token_ids"] for line in found] == alone
    piped = lines(outrider("generate", "--file", "-", *common, stdin="one\n"))
    assert piped[0]["token_ids"] == alone[1]


def test_samples_are_reproducible_and_have_logprobs(outrider, model) -> None:
    common = ("generate", "hello", "-m", model, "--max-tokens", 8, "--ignore-eos", "--json", "--temperature", 1)
    (first,) = lines(outrider(*common, "--seed", 3, "--n", 2, "--logprobs", 2))
    (again,) = lines(outrider(*common, "--seed", 3))
    (other,) = lines(outrider(*common, "--seed", 4))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert first["samples"][0]["token_ids"] == first["token_ids"]
    assert len({tuple(sample["token_ids"]) for sample in first["samples"]}) == 2
    assert [entry["token"] for entry in first["logprobs"]] == first["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in first["logprobs"])
    assert "logprobs" not in again and "samples" not in again


def test_top_k_top_p_and_min_p_reach_the_sampler(outrider, model) -> None:
    common = ("generate", "hello", "-m", model, "--max-tokens", 12, "--ignore-eos", "--json")
    (greedy,) = lines(outrider(*common))
    (hot,) = lines(outrider(*common, "--temperature", 3, "--seed", 1))
    assert hot["token_ids"] != greedy["token_ids"]
    for strict in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)):
        (found,) = lines(outrider(*common, "--temperature", 3, "--seed", 1, *strict))
        assert found["token_ids"] == greedy["token_ids"], strict


def test_a_stop_string_ends_the_text(outrider, model) -> None:
    common = ("generate", "hello", "-m", model, "--max-tokens", 30, "--ignore-eos", "--json")
    (whole,) = lines(outrider(*common))
    stop = whole["text"][4:6]
    (cut,) = lines(outrider(*common, "--stop", "no such text", "--stop", stop))
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize("extra", [("--backend", "reference"), ("--quantize", "int8"), ("--threads", "1")])
def test_engine_flags_are_accepted(outrider, model, extra) -> None:
    (found,) = lines(outrider("generate", "hello", "-m", model, "--max-tokens", 3, "--ignore-eos", "--json", *extra))
    assert len(found["token_ids"]) == 3


def test_max_context_ends_the_text(outrider, model) -> None:
    common = ("generate", "abcdef", "--raw", "-m", model, "--max-tokens", 50, "--ignore-eos", "--json")
    (found,) = lines(outrider(*common, "--max-context", 16))
    assert len(found["token_ids"]) == 10
    assert found["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [(), ("--speculate", "auto")], ids=["omitted", "said"])
def test_auto_is_the_default_and_changes_nothing_but_the_steps(outrider, model, asked) -> None:
    common = ("generate", "ababab", "-m", model, "--max-tokens", 60, "--ignore-eos", "--backend", "cpu")
    (plain,) = lines(outrider(*common, "--speculate", "none", "--json"))
    found = outrider(*common, *asked, "--json")
    (body,) = lines(found)
    assert found.stderr == "", "JSON output has no remarks beside it"
    assert body["token_ids"] == plain["token_ids"]
    assert (plain["stats"]["method"], body["stats"]["method"]) == ("none", choose(str(model), "cpu"))
    line = f"drafting: {body['stats']['method']}, chosen by auto; `--speculate none` is plain decoding\n"
    assert outrider(*common, *asked).stderr.startswith(line)
    assert "drafting" not in outrider(*common, "--speculate", "none").stderr


def test_auto_names_the_modules_of_the_model(outrider, tmp_path) -> None:
    model = tiny_modules.inside(tiny_modules.ModulePlan(), tmp_path / "model", "qwen")
    first, _, _ = outrider("generate", "ab", "-m", model, "--max-tokens", 4, "--backend", "cpu").stderr.partition("\n")
    method = choose(str(model), "cpu", modules=True)
    assert first.startswith(f"drafting: {method}")
    assert first.endswith("chosen by auto; `--speculate none` is plain decoding")


def test_auto_says_if_it_knows_no_method(outrider, model) -> None:
    found = outrider("generate", "ab", "-m", model, "--max-tokens", 4, "--backend", "reference")
    assert found.stderr.startswith("drafting: none, auto knows no faster method here; `--speculate METHOD` names one\n")


@pytest.mark.parametrize(
    ("asked", "width"),
    [
        (("--speculate", "ngram:adaptive=no"), 8),
        (("--speculate", "ngram:width=3,adaptive=no"), 3),
        (("--speculative-config", json.dumps(TWO_TOKENS), "--always-draft"), 2),
    ],
)
def test_speculation_changes_nothing_but_the_steps(outrider, model, asked, width) -> None:
    common = ("generate", "ababab", "-m", model, "--max-tokens", 60, "--ignore-eos", "--json")
    (plain,) = lines(outrider(*common, "--speculate", "none"))
    (found,) = lines(outrider(*common, *asked))
    stats = found["stats"]
    assert found["token_ids"] == plain["token_ids"]
    assert stats["method"] == "ngram"
    assert stats["drafted"] >= stats["accepted"] > 0
    assert stats["steps"] + stats["accepted"] == 60
    drafts = sum(steps for width, steps in stats["widths"].items() if width != "0")
    assert stats["tokens_per_step"] == pytest.approx(60 / stats["steps"], abs=1e-3)
    assert stats["mean_acceptance_length"] == pytest.approx(1 + stats["accepted"] / drafts, abs=1e-3)
    assert 1 <= len(stats["acceptance_rates"]) <= width
    assert 0 < stats["acceptance_rates"][0] <= 1 and min(stats["acceptance_rates"]) >= 0


def test_the_speculation_summary_is_printed(outrider, model) -> None:
    common = ("-m", model, "--max-tokens", 40, "--ignore-eos", "--speculate", "ngram:adaptive=no")
    (body,) = lines(outrider("generate", "abab", *common, "--json"))
    one = outrider("generate", "abab", *common)
    method, drafted, kept = re.fullmatch(SUMMARY, one.stderr.splitlines(keepends=True)[1]).groups()[:3]
    assert (method, int(drafted), int(kept)) == ("ngram", body["stats"]["drafted"], body["stats"]["accepted"])
    both = outrider("generate", "abab", "--n", 2, *common)
    assert int(re.search(SUMMARY, both.stderr)[3]) == 2 * int(kept)


def test_a_suspension_is_explained_in_numbers(outrider, model, monkeypatch) -> None:
    """Verifying one more row is made to look ten times as long as a plain step, so no draft pays."""
    seconds = lambda self, batch_size, drafted: [1.0 + 9.0 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr("outrider.speculation.adaptive.latency_model.LatencyModel.table", seconds)
    common = ("abab", "-m", model, "--max-tokens", 40, "--ignore-eos", "--speculate", "ngram")
    (body,) = lines(outrider("generate", *common, "--json"))
    stats = body["stats"]
    assert 0 < stats["suspended"] <= 40 and stats["drafted"] == 0
    assert stats["suspension"]["cost"] > stats["suspension"]["tokens"] > stats["suspension"]["acceptance_rate"]
    printed = outrider("generate", *common).stderr.splitlines()
    assert printed[-2] == "nothing drafted by ngram"
    assert re.fullmatch(
        r"drafts suspended in \d+ of 40 steps: a step with \d+ rows costs \d+\.\d\dx of one row here, and yields "
        r"\d\.\d\dx the tokens at acceptance rate \d\.\d\d; `--always-draft` forces them",
        printed[-1],
    )


def test_a_prediction_is_drafted_from(outrider, model, tmp_path) -> None:
    common = ("generate", "hello", "-m", model, "--max-tokens", 40, "--ignore-eos", "--json")
    (plain,) = lines(outrider(*common))
    file = tmp_path / "expected.txt"
    file.write_text(plain["text"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello", "prediction": plain["text"]}))
    asked = (("--prediction", file), ("--prediction", plain["text"]))
    found = [lines(outrider(*common, *one))[0] for one in asked]
    found += lines(outrider("generate", "--file", prompts, *common[2:]))
    # The clock may cut any draft, but not this one's.
    found += lines(outrider(*common, *asked[0], "--speculate", "prediction:adaptive=no"))
    for one in found:
        assert one["token_ids"] == plain["token_ids"]
        assert one["stats"]["method"] == "prediction"
    assert found[-1]["stats"]["steps"] < 20
    (without,) = lines(outrider(*common, "--prediction", file, "--speculate", "none"))
    assert (without["stats"]["steps"], without["stats"]["method"]) == (40, "none")


def test_a_prompt_can_be_piped(outrider, model) -> None:
    common = ("generate", "-m", model, "--max-tokens", 6, "--json")
    (given,) = lines(outrider(*common, "one\ntwo"))
    for arguments in ((), ("-",)):
        (piped,) = lines(outrider(*common, *arguments, stdin="one\ntwo\n"))
        assert (piped["prompt"], piped["token_ids"]) == ("one\ntwo", given["token_ids"])
    assert [one["prompt"] for one in lines(outrider(*common, "hello", "-", stdin="piped\n"))] == ["hello", "piped"]
    assert [one["prompt"] for one in lines(outrider(*common, "hello", stdin="not read\n"))] == ["hello"]
    for arguments in ((), ("-",)):
        empty = outrider(*common, *arguments, stdin="")
        assert empty.exit_code == 2 and "pass a prompt, `-` to read one from stdin" in empty.stderr.replace("\n", " ")


def test_a_trace_reads_its_prompt_from_stdin(outrider, model) -> None:
    common = ("trace", "-m", model, "--max-tokens", 4, "--json")
    prompts = [json.loads(outrider(*common, *arguments, stdin="abc\n").stdout)["prompt"] for arguments in ((), ("-",))]
    assert prompts == ["abc", "abc"]


@pytest.mark.parametrize("name", ["nofile.py", "./nofile", "src/nofile.txt", "~/nofile"])
def test_a_prediction_that_names_no_file_is_refused(outrider, model, name: str) -> None:
    for command in ("generate", "trace"):
        found = outrider(command, "hello", "-m", model, "--prediction", name)
        assert found.exit_code == 1 and f"`--prediction` is `{name}`, but there is no such file" in found.stderr


@pytest.mark.parametrize("text", ["3.14 is pi", "def f(x):\n    return x.y", "plain", "The end.", "x=1;y.z()"])
def test_a_prediction_may_be_a_text(outrider, model, text: str) -> None:
    assert outrider("generate", "hello", "-m", model, "--max-tokens", 2, "--prediction", text).exit_code == 0


# ---- prompts that cannot be served ----

LONG = "x" * 300
SHORT = ("--max-tokens", 4, "--ignore-eos", "--max-context", 128)


@pytest.mark.parametrize("bad", [LONG, json.dumps({"prompt": LONG}), json.dumps({"messages": [{"role": "user"}]})])
def test_a_line_that_cannot_be_served_is_named_and_the_others_are_answered(outrider, model, tmp_path, bad) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"hello\n\n{bad}\nworld\n")
    command = ("generate", "--file", file, "-m", model, *SHORT)
    found = outrider(*command, "--json")
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.exit_code == 1 and [one["finish_reason"] for one in answers] == ["length", "error", "length"]
    assert f"`{file}` line 3: " in answers[1]["error"] and answers[1]["token_ids"] == []
    assert f"error: 1 of 3 outputs failed: `{file}` line 3: " in found.stderr
    file.write_text("hello\nworld\n")
    whole = lines(outrider(*command, "--json"))
    assert [one["token_ids"] for one in whole] == [answers[0]["token_ids"], answers[2]["token_ids"]]
    file.write_text(f"hello\n{bad}\nworld\n")
    text = outrider(*command)
    assert text.exit_code == 1 and "hello\n" in text.stdout and "world\n" in text.stdout and LONG not in text.stdout
    stopped = outrider(*command, "--json", "--no-keep-going")
    assert stopped.exit_code == 1 and stopped.stdout == ""
    assert f"`{file}` line 2: " in stopped.stderr and "`--keep-going` answers the others" in stopped.stderr


def test_of_several_prompts_the_one_that_cannot_be_served_is_numbered(outrider, model) -> None:
    command = ("generate", "hello", LONG, "-m", model, *SHORT, "--json")
    found = outrider(*command)
    assert found.exit_code == 1 and found.stdout == "" and "error: prompt 2: the prompt has " in found.stderr
    found = outrider(*command, "--keep-going")
    reasons = [json.loads(line)["finish_reason"] for line in found.stdout.splitlines()]
    assert found.exit_code == 1 and reasons == ["length", "error"]
    alone = outrider("generate", LONG, "-m", model, *SHORT)
    assert alone.exit_code == 1 and alone.stdout == "" and alone.stderr.startswith("error: the prompt has ")


def test_measurements_name_the_line_of_a_prompt_that_is_too_long(outrider, model, tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n" + "x" * 5000)
    found = outrider("verify", "--file", file, "-m", model, "--max-tokens", 4)
    assert found.exit_code == 1 and f"`{file}` line 2: the prompt has " in found.stderr


def test_a_prediction_without_drafting_is_reported(outrider, model) -> None:
    common = ("generate", "hello", "-m", model, "--max-tokens", 2, "--prediction", "plain")
    said = "the prediction has no effect: `--speculate none` turns drafting off\n"
    assert said in outrider(*common, "--speculate", "none").stderr
    assert said not in outrider(*common).stderr


def test_an_adapter_changes_the_text_of_all_prompts(outrider, model, llm, tmp_path) -> None:
    adapter = tiny_lora.save("llama", tmp_path / "adapter", 3)
    common = ("hello", "world", "--raw", "-m", model, "--max-tokens", 8, "--ignore-eos", "--json")
    plain, adapted = lines(outrider("generate", *common)), lines(outrider("generate", *common, "--lora", adapter))
    assert all(before["token_ids"] != after["token_ids"] for before, after in zip(plain, adapted, strict=True))
    refused = outrider("generate", *common, "--lora", tmp_path)
    assert refused.exit_code != 0 and "no `adapter_config.json`" in refused.stderr
