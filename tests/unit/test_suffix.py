"""Suffix decoding: the tree against a count of everything, and the method."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import talk
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.errors import UserError
from outrider.speculation import find
from outrider.speculation.drafters.lookup import MAX_MATCH, TOKEN_BITS
from outrider.speculation.methods.suffix import MAX_LISTED, ROOT, SuffixTree, Text

Gram = tuple[int, ...]


def count_all(texts: Sequence[Text], depth: int) -> Counter[Gram]:
    """How often each n-gram occurs, by looking everywhere."""
    found: Counter[Gram] = Counter()
    for text in texts:
        for start in range(len(text.tokens)):
            for size in range(1, min(depth, len(text.tokens) - start) + 1):
                found[tuple(text.tokens[start : start + size])] += 1
    return found


def count_in(tree: SuffixTree, gram: Gram) -> int:
    node = ROOT
    for token in gram:
        occurrences = tree.occurrences[node]
        if occurrences is not None:
            return sum(tuple(text.tokens[start : start + len(gram)]) == gram for text, start in occurrences)
        node = tree.edges.get(node << TOKEN_BITS | token, ROOT)
        if node == ROOT:
            return 0
    return tree.count[node]


def check(tree: SuffixTree, texts: Sequence[Text], depth: int) -> None:
    counts = count_all(texts, depth)
    assert {gram: count_in(tree, gram) for gram in counts} == dict(counts)
    for text in texts:
        sizes = [size for size, _ in text.open_suffixes]
        assert sizes == list(range(len(sizes), 0, -1))
        for size in range(len(sizes) + 1, min(depth - 1, len(text.tokens)) + 1):
            assert counts[tuple(text.tokens[-size:])] <= MAX_LISTED  # what is frequent stands open
    for node in range(1, len(tree.count)):
        if tree.child[node] != ROOT and node not in tree.free:
            children = [tree.count[child] for child in tree.children_of(node)]
            assert tree.count[tree.best[node]] == max(children) and tree.followed[node] == sum(children)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(2, 6), st.integers(1, 4))
def test_counts_are_exact_while_texts_grow_and_go(source: random.Random, depth: int, vocabulary: int) -> None:
    tree, texts = SuffixTree(depth), [Text(), Text()]
    for _ in range(60):
        action = source.random()
        if action < 0.9 and texts:
            tree.extend(source.choice(texts), source.randrange(vocabulary))
        elif action < 0.95 and texts:
            tree.remove(texts.pop(source.randrange(len(texts))))
            check(tree, texts, depth)
        else:
            texts.append(Text())
    check(tree, texts, depth)
    for text in texts:
        tree.remove(text)
    assert tree.nodes == 0 and tree.edges == {}
    assert sorted(tree.free) == list(range(1, len(tree.count)))


def expected(texts: Sequence[Text], text: Text, size: int, width: int) -> tuple[list[int], list[float]]:
    """What most often followed the last `size` tokens, by looking everywhere; ties are the test's to avoid."""
    gram, tokens, rates = text.tokens[-size:], [], []
    while len(tokens) < width:
        successors: Counter[int] = Counter()
        for other in texts:
            for at in range(len(gram), len(other.tokens)):
                if other.tokens[at - len(gram) : at] == gram:
                    successors[other.tokens[at]] += 1
        if not successors:
            break
        most = max(successors.values())
        if list(successors.values()).count(most) > 1:
            raise ValueError("a tie")
        token = max(successors, key=lambda one: successors[one])
        tokens.append(token)
        rates.append(most / successors.total())
        gram = [*gram, token]
    return tokens, rates


@settings(max_examples=60)
@example([[1, 1, 1, 0, 1, 1, 1, 1, 1]], 2)  # equal scores that differ in rounding
@given(st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=3), st.integers(1, 6))
def test_the_best_continuation_has_the_highest_score(contents: list[list[int]], width: int) -> None:
    tree, texts = SuffixTree(40), [Text() for _ in contents]
    for text, tokens in zip(texts, contents, strict=True):
        for token in tokens:
            tree.extend(text, token)
    text = texts[0]
    continuations = {}
    for size in range(1, min(len(text.tokens), MAX_MATCH) + 1):
        try:
            continuations[size] = expected(texts, text, size, min(width, size))
        except ValueError:
            return
    scores = {}
    for size, (_, rates) in continuations.items():
        whole, scores[size] = 1.0, 0.0
        for rate in rates:
            whole *= rate
            scores[size] += whole
    best = tree.best_continuation(text, width, 1.0, 0.0)
    assert best.score == pytest.approx(max(scores.values(), default=0.0))
    if best.tokens:
        assert best.match == max(size for size, score in scores.items() if score == pytest.approx(best.score))
        assert (best.tokens, best.shares) == continuations[best.match]


def test_of_equal_scores_the_longest_match_is_taken() -> None:
    tree, text = SuffixTree(40), Text()
    for token in [1, 2, 3] * 3 + [1, 2]:
        tree.extend(text, token)
    best = tree.best_continuation(text, 1, 1.0, 0.0)
    assert (best.tokens, best.match) == ([3], min(8, MAX_MATCH))


def grown(tree: SuffixTree, tokens: Sequence[int]) -> Text:
    text = Text()
    for token in tokens:
        tree.extend(text, token)
    return text


def test_the_end_of_the_text_does_not_dilute_its_past() -> None:
    tree = SuffixTree(8)
    text = grown(tree, [1, 2, 3, 9, 1, 2, 3, 8, 1, 2])
    assert tree.best_continuation(text, 8, 1.0, 0.0).shares[0] == 1.0


def test_a_rare_token_before_a_frequent_one_hides_nothing() -> None:
    tree = SuffixTree(8)
    text = grown(tree, [1, 3, *[2, 5] * (MAX_LISTED + 1), 1, 2])
    assert tree.best_continuation(text, 1, 1.0, 0.0).tokens == [5]


@pytest.mark.parametrize("repeats", [1, MAX_LISTED + 1])  # read from the occurrences, and from the children
def test_among_equals_the_latest(repeats: int) -> None:
    for first, second in ((7, 8), (8, 7)):
        tree = SuffixTree(2)
        text = grown(tree, [5, 1, first, 6, 1, second] * repeats + [1])
        assert tree.best_continuation(text, 1, 1.0, 0.0).tokens == [second]


def test_unlikely_and_long_drafts_are_cut() -> None:
    tree = SuffixTree(24)
    text = grown(tree, [1, 5, 2, 1, 6, 3, 1, 7, 4, 1, 8, 1])
    assert tree.best_continuation(text, 9, 1.0, 0.3).tokens == []
    assert tree.best_continuation(text, 9, 1.0, 0.2).tokens == [8]
    text = grown(tree, [20, 21, 22, 23, 24, 25, 26, 20, 21])
    assert tree.best_continuation(text, 9, 1.0, 0.1).tokens == [22, 23]
    assert tree.best_continuation(text, 9, 2.0, 0.1).tokens == [22, 23, 24, 25]
    assert tree.best_continuation(text, 3, 2.0, 0.1).tokens == [22, 23, 24]


def test_answers_help_other_requests_and_prompts_stay_private() -> None:
    suffix = talk.make("suffix", least=0)
    one = talk.request([50, 51, 52, 53])
    for token in range(10, 20):
        talk.say(suffix, one, token)
    suffix.release([one])
    other = talk.request([60])
    assert talk.say(suffix, other, 50) == []
    assert talk.say(suffix, other, 12, 13, 14) == [15, 16, 17]


def test_answers_help_only_requests_of_the_same_salt() -> None:
    suffix = talk.make("suffix", least=0, cached_requests=2)
    for salt in ("a", "b", "c"):
        one = talk.request([50], cache_salt=salt)
        talk.say(suffix, one, *range(10, 20))
        suffix.release([one])
    assert set(suffix.answers) == {"b", "c"}  # the tree of the answer that was dropped is gone
    for salt, drafted in {"": [], "b": [15, 16, 17], "d": []}.items():
        assert talk.say(suffix, talk.request([60], cache_salt=salt), 12, 13, 14) == drafted


def test_requests_that_run_at_once_help_each_other() -> None:
    suffix = talk.make("suffix", least=0)
    one, other = talk.request([1]), talk.request([2])
    talk.propose(suffix, [(one, [10, 11, 12, 13]), (other, [90])])
    assert talk.say(suffix, other, 10, 11) == [12, 13]
    suffix.release([one, other])
    assert suffix.states == {} and len(suffix.finished) == 2


def test_the_own_text_goes_before_that_of_others() -> None:
    suffix = talk.make("suffix", least=0)
    one = talk.request([0])
    talk.say(suffix, one, 1, 2, 3, 9)
    suffix.release([one])
    other = talk.request([1, 2, 4, 7])
    assert talk.say(suffix, other, 1, 2) == [4, 7]


def test_old_answers_are_forgotten_first_in_first_out() -> None:
    suffix = talk.make("suffix", cached_requests=2, least=0)
    for start in (10, 20, 30):
        one = talk.request([1])
        talk.say(suffix, one, *range(start, start + 5))
        suffix.release([one])
    assert [text.tokens[0] for _, text in suffix.finished] == [20, 30]
    check(suffix.answers[""], [text for _, text in suffix.finished], 24)
    other = talk.request([2])
    assert talk.say(suffix, other, 10, 11) == []
    assert talk.say(suffix, other, 20, 21) == [22, 23]


def test_memory_is_bounded() -> None:
    suffix = talk.make("suffix", cached_nodes=300)
    source = random.Random(1)
    for _ in range(40):
        one = talk.request([1])
        for _ in range(5):
            talk.say(suffix, one, *[source.randrange(30) for _ in range(10)])
        suffix.release([one])
        assert suffix.answers[""].nodes <= 300
    assert len(suffix.answers[""].count) < 600  # places are used again
    check(suffix.answers[""], [text for _, text in suffix.finished], 24)
    suffix = talk.make("suffix", cached_requests=0)
    one = talk.request([1, 2, 3])
    talk.say(suffix, one, 1, 2, 3, 1)
    suffix.release([one])
    assert (suffix.states, list(suffix.finished), suffix.answers) == ({}, [], {})


def test_nothing_is_drafted_inside_a_prompt_or_without_draft_tokens() -> None:
    suffix = talk.make("suffix", least=0)
    one = talk.request([1, 2, 3, 4, 1, 2, 3, 4])
    assert talk.say(suffix, one) == []
    assert talk.say(suffix, one, 1, width=0) == []
    assert talk.say(suffix, one, 2, width=2) == [3, 4]
    suffix.accept([one], [0])


def test_the_same_texts_give_the_same_drafts() -> None:
    source = random.Random(7)
    answers = [[source.randrange(4) for _ in range(80)] for _ in range(4)]

    def drafts() -> list[list[int]]:
        suffix, found = talk.make("suffix"), []
        for answer in answers:
            one = talk.request(answer[:10])
            for token in answer[10:]:
                found.append(talk.say(suffix, one, token))
            suffix.release([one])
        return found

    assert drafts() == drafts()


def test_where_the_past_disagrees_less_is_promised() -> None:
    suffix = talk.make("suffix", least=0)
    sure = talk.propose(suffix, [(talk.request([1, 2, 3, 9]), [1, 2])]).confidence
    torn = talk.propose(suffix, [(talk.request([1, 2, 4, 9, 8, 1, 2, 3, 7]), [1, 2])]).confidence
    assert sure is not None and torn is not None
    assert torn[0][0] < sure[0][0]


def test_impossible_options_are_refused() -> None:
    with pytest.raises(UserError, match="`depth` is 1"):
        find("suffix").Options(depth=1)
    with pytest.raises(UserError, match="`factor` is 0"):
        find("suffix").Options(factor=0)
