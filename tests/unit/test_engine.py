"""What a user of LLM can rely on: stops, limits, penalties, seeds, samples, refusals."""

from __future__ import annotations

import gc
import itertools
import math
from dataclasses import replace

import pytest
import torch

from outrider import SamplingParams, UserError
from outrider.device import Cpu, DeviceDefaults
from outrider.runner import Runner

PROMPT = list(range(5, 25))
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
WARM = SamplingParams(max_tokens=20, temperature=1, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llm):
    return tiny_llm()


def only(llm, params, prompt=PROMPT):
    return llm.generate([prompt], params)[0].completions[0]


def test_greedy_takes_the_argmax(llm) -> None:
    found = only(llm, replace(GREEDY, logprobs=1))
    assert [entry.top[0][0] for entry in found.logprobs] == found.token_ids
    assert all(entry.rank == 1 for entry in found.logprobs)


def test_logprobs_are_the_models_own(llm) -> None:
    """Neither temperature nor bias changes them."""
    plain = only(llm, replace(GREEDY, max_tokens=1, logprobs=100)).logprobs[0]
    bent = only(llm, replace(GREEDY, max_tokens=1, logprobs=100, logit_bias={9: 100.0}))
    assert bent.token_ids == [9]
    assert bent.logprobs[0].top == plain.top
    assert 0.99 < sum(math.exp(value) for _, value in plain.top) < 1.00001  # 100 of 101 tokens


def test_a_prompt_beyond_the_context_is_refused_with_advice_that_can_be_followed(llm, tiny_llm) -> None:
    trained = llm.engine.model.config.context
    with pytest.raises(UserError, match=r"for the answer: shorten the prompt$"):
        llm.generate([5] * trained, GREEDY)
    with pytest.raises(UserError, match=r"the context holds 24, .* or raise `max_context` or `cache_tokens`$"):
        tiny_llm(max_context=24).generate([5] * 24, GREEDY)


def test_max_tokens_and_context_end_with_length(llm, tiny_llm) -> None:
    assert only(llm, replace(GREEDY, max_tokens=3)).finish_reason == "length"
    short = only(tiny_llm(max_context=24), GREEDY)
    assert len(short.token_ids) == 4 and short.finish_reason == "length"


def test_stop_token(llm) -> None:
    plain = only(llm, WARM).token_ids
    stop = plain[7]
    found = only(llm, replace(WARM, stop_token_ids=[stop]))
    assert found.token_ids == plain[: plain.index(stop) + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)


def test_min_tokens_keeps_the_end_away(llm) -> None:
    plain = only(llm, WARM).token_ids
    found = only(llm, replace(WARM, stop_token_ids=[plain[0]], min_tokens=5))
    assert plain[0] not in found.token_ids[:5]
    assert len(found.token_ids) >= 5


@pytest.mark.parametrize("included", [False, True])
def test_stop_string_across_tokens(llm, included: bool) -> None:
    plain = only(llm, WARM)
    stop = plain.text[6:9]  # three tokens of one character
    end = plain.text.index(stop)
    seen = list(llm.stream(PROMPT, replace(WARM, stop=[stop], include_stop_str_in_output=included)))
    found = seen[-1].completions[0]
    assert found.text == plain.text[: end + 3 * included]
    assert found.token_ids == plain.token_ids[: end + 3]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    for output in seen:
        assert found.text.startswith(output.completions[0].text)


def test_streamed_text_only_grows_to_the_whole(llm) -> None:
    texts = [output.completions[0].text for output in llm.stream(PROMPT, WARM)]
    assert len(texts) == 20
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == only(llm, WARM).text


def test_bans_and_permissions(llm) -> None:
    plain = only(llm, GREEDY).token_ids
    assert plain[0] not in only(llm, replace(GREEDY, banned_token_ids=[plain[0]])).token_ids
    assert set(only(llm, replace(WARM, allowed_token_ids=[3, 4, 5])).token_ids) <= {3, 4, 5}


def test_bad_words_of_several_tokens(llm) -> None:
    plain = only(llm, GREEDY).text
    word = plain[4:6]
    assert word in plain
    assert word not in only(llm, replace(GREEDY, bad_words=[word])).text


def test_penalties_make_repeats_rarer(llm) -> None:
    plain = only(llm, replace(GREEDY, max_tokens=60)).token_ids
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 50.0}):
        assert len(set(only(llm, replace(GREEDY, max_tokens=60, **penalty)).token_ids)) > len(set(plain))


def test_seeds(llm) -> None:
    assert only(llm, WARM).token_ids == only(llm, WARM).token_ids
    assert only(llm, WARM).token_ids != only(llm, replace(WARM, seed=5)).token_ids
    unseeded = replace(WARM, seed=None)
    assert only(llm, unseeded).token_ids != only(llm, unseeded).token_ids


def test_n_samples_share_their_prompt(llm) -> None:
    prompt = list(range(7, 90))
    output = llm.generate([prompt], replace(WARM, n=3))[0]
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.completions}) == 3
    first = only(llm, WARM, prompt)
    assert output.completions[0].token_ids == first.token_ids


def test_a_sample_that_waits_costs_no_work_in_a_step(llm) -> None:
    """Of 32 samples 3 decode beside another request: to copy the lists of the others took more than to decode."""
    engine = llm.engine
    other = engine.add(PROMPT, replace(GREEDY, max_tokens=40))
    parent = engine.add(PROMPT, replace(WARM, n=32, logprobs=2))
    before, changes = {}, []
    try:
        for _ in range(20):
            for output in engine.step():
                if output.request_id == parent:
                    now = {one.index: one for one in output.completions}
                    changes.append(sum(one is not before.get(index) for index, one in now.items()))
                    assert all(len(one.logprobs) == len(one.token_ids) for one in now.values())
                    before = now
    finally:
        for request in (other, parent):
            engine.abort(request)
    assert len(changes) > 10 and max(changes[-5:]) == 3


def test_vllms_quantization_and_revision_are_refused_where_they_cannot_hold(tiny_llm) -> None:
    for name in ("awq", "gptq_marlin", "gguf", "fbgemm_fp8", "mxfp4"):
        with pytest.raises(UserError, match=f"`quantization` is `{name}`, but .* is not quantized: leave it out"):
            tiny_llm(quantization=name)
    with pytest.raises(UserError, match="`revision` needs a model of the hub"):
        tiny_llm(revision="v1")


def test_the_times_of_a_request_add_up(tiny_llm) -> None:
    first, second = tiny_llm(max_requests=1).generate([PROMPT, PROMPT[:9]], GREEDY)
    for stats in (first.stats, second.stats):
        assert min(stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) > 0
        assert stats.queue_seconds + stats.prefill_seconds + stats.decode_seconds == pytest.approx(stats.seconds)
        assert stats.time_per_output_token == pytest.approx(stats.decode_seconds / 19)
    assert second.stats.queue_seconds > first.stats.decode_seconds  # it waited for the only row of the engine
    assert first.stats.queue_seconds < first.stats.decode_seconds


def test_a_preempted_request_is_not_queued_again(tiny_llm) -> None:
    llm = tiny_llm(max_requests=1)
    llm.engine.add(PROMPT, GREEDY)
    llm.engine.step()
    (request,) = next(iter(llm.engine.parents.values())).requests
    admitted = request.admitted
    llm.engine.clear_cache()
    llm.engine.step()
    assert request.preemptions == 1 and request.admitted == admitted


def test_prompt_logprobs_in_any_chunking(llm, tiny_llm) -> None:
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=2)
    whole = llm.generate([PROMPT], params)[0].prompt_logprobs
    assert whole[0] is None and [entry.token for entry in whole[1:]] == PROMPT[1:]
    pieces = tiny_llm(max_step_tokens=6).generate([PROMPT], params)[0].prompt_logprobs
    assert pieces == whole
    again = llm.generate([PROMPT], params)[0].prompt_logprobs
    assert again == whole


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_between_steps_only(llm, monkeypatch, enabled: bool) -> None:
    """Who has switched collection off finds it off afterwards."""
    within, run_target = [], Runner._run_target

    def noted(self, *args):
        within.append(gc.isenabled())
        return run_target(self, *args)

    monkeypatch.setattr(Runner, "_run_target", noted)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        llm.generate([PROMPT], replace(GREEDY, max_tokens=3))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert within == [False] * 3


def test_torch_keeps_to_one_thread_within_a_step(llm, monkeypatch) -> None:
    runner, seen = llm.engine.runner, []

    def watched(step):
        seen.append(torch.get_num_threads())
        return type(runner).step(runner, step)

    monkeypatch.setattr(runner, "step", watched)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        only(llm, SamplingParams(max_tokens=3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == ({1} if llm.resolved.backend == "cpu" else {2})


@pytest.mark.parametrize("params", [GREEDY, WARM, replace(WARM, top_k=5, top_p=0.8, min_p=0.05)])
@pytest.mark.parametrize("method", ["none", "ngram:width=3,adaptive=false", "ngram:width=6,branches=2,adaptive=false"])
def test_a_step_by_replay_gives_the_tokens_of_other_steps(tiny_llm, params: SamplingParams, method: str) -> None:
    replayed, other = tiny_llm(speculate=method), tiny_llm(speculate=method)
    other.engine.runner.single_row.recordings.enabled = False
    for prompt in (PROMPT, [5, 6, 7] * 5):
        assert only(replayed, params, prompt) == only(other, params, prompt)
    assert replayed.engine.runner.single_row.recordings.num_recorded > 0
    assert other.engine.runner.single_row.recordings.num_recorded == 0


def test_abort_frees_everything(llm) -> None:
    name = llm.engine.add(PROMPT, WARM)
    llm.engine.step()
    output = llm.engine.abort(name)
    assert output is not None and output.completions[0].finish_reason == "abort"
    assert llm.engine.is_idle
    llm.engine.scheduler.check()
    assert llm.engine.abort(name) is None


def test_a_row_that_breaks_the_step_ends_alone(llm, monkeypatch, caplog) -> None:
    prompts = [[5, 6], [7, 8], [9, 10]]
    expected = [output.completions[0].token_ids for output in llm.generate(prompts, WARM)]
    run_target = llm.engine.runner._run_target

    def fragile(rows, aux_layers):
        if any(row.request.prompt == [7, 8] and len(row.request.output) == 4 for row in rows):
            raise RuntimeError("no such page")
        return run_target(rows, aux_layers)

    monkeypatch.setattr(llm.engine.runner, "_run_target", fragile)
    first, second, third = (output.completions[0] for output in llm.generate(prompts, WARM))
    assert (second.finish_reason, second.stop_reason) == ("error", "no such page")
    assert second.token_ids == expected[1][:4]
    assert [first.token_ids, third.token_ids] == [expected[0], expected[2]]
    assert "no such page" in caplog.text
    llm.engine.scheduler.check()


@pytest.mark.parametrize(
    ("prompt", "params", "culprit"),
    [
        ([], GREEDY, "empty"),
        ([5] * 2000, GREEDY, "2000 tokens"),
        ([5, 101], GREEDY, "token 101"),
        ([-1], GREEDY, "token -1"),
        ([5], replace(GREEDY, logit_bias={1000: 1.0}), "logit_bias"),
        ([5], replace(GREEDY, allowed_token_ids=[101]), "allowed_token_ids"),
    ],
)
def test_refusals_leave_the_engine_alive(llm, prompt, params, culprit) -> None:
    with pytest.raises(UserError, match=culprit):
        llm.generate([prompt], params)
    assert len(only(llm, GREEDY).token_ids) == 20


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -2},
        {"min_p": 2},
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 300},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"stop": [""]},
        {"seed": -1},
        {"logprobs": -1},
        {"allowed_token_ids": []},
        {"speculate": 1.5},
        {"speculate_width": -1},
    ],
)
def test_impossible_parameters_are_named(field) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        SamplingParams(**field)


def test_unknown_options_are_refused(tiny_llm) -> None:
    with pytest.raises(UserError, match="no option called `colour`"):
        tiny_llm(colour="red")


def test_the_dry_run_is_as_large_as_steps_may_be(tiny_llm, monkeypatch) -> None:
    largest: list[tuple[int, int]] = []
    monkeypatch.setattr(Cpu, "defaults", DeviceDefaults(cache_share=0.4, step_tokens=8, decode_steps=1))
    monkeypatch.setattr(Cpu, "peak_bytes", lambda _, run: run() or 0)
    monkeypatch.setattr(Runner, "profile_run", lambda _, tokens, rows: largest.append((tokens, rows)))
    llm = tiny_llm(max_requests=20)
    assert largest == [(llm.resolved.max_step_tokens, 20)]


def test_a_sample_may_have_the_id_of_another_parent(tiny_llm) -> None:
    engine = tiny_llm().engine
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    engine.add([5, 6], params, "x")
    engine.add([5, 6], params, "x-0")
    engine.abort("x-0")
    outputs = [output for _ in range(6) for output in engine.step()]
    assert [output.request_id for output in outputs if output.finished] == ["x"]


def test_a_number_that_was_chosen_as_a_name_is_not_given_again(tiny_llm) -> None:
    engine = tiny_llm().engine
    params = SamplingParams(max_tokens=2, temperature=0)
    names = [engine.add([5], params, "1"), engine.add([5], params), engine.add([5], params)]
    assert len(set(names)) == 3


def test_a_streamed_text_only_grows(tiny_llm) -> None:
    params = SamplingParams(
        max_tokens=20, min_tokens=10, temperature=0, ignore_eos=True, allowed_token_ids=[14], stop=["+", "abc"]
    )
    texts = [output.completions[0].text for output in tiny_llm().stream([5, 6], params)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
