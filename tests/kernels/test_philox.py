"""The noise is Philox 4x32-10, and it depends on (seed, position, token, stream, epoch) alone."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.kernels import philox

# The known answers that the authors of Philox publish with their library: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    a, b, c, d = (torch.tensor([word]) for word in words(counter))
    low, high = (torch.tensor([word]) for word in words(key))
    assert [int(word) for word in philox.block((a, b, c, d), (low, high))] == words(expected)


def test_seed_position_token_stream_and_epoch_go_where_the_contract_says() -> None:
    seed, position, token, stream, epoch = 0x0123456789ABCDEF, 70_000, 49_151, 5, 69_000
    counter = tuple(torch.tensor([word]) for word in (token // 4, position, stream, epoch))
    expected = philox.block(counter, (torch.tensor([0x89ABCDEF]), torch.tensor([0x01234567])))[token % 4]
    where = (torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    assert torch.equal(philox.philox(*where, stream, torch.tensor([epoch])), expected)
    without = philox.philox(*where, stream)
    assert torch.equal(without, philox.philox(*where, stream, torch.tensor([0]))) and not torch.equal(without, expected)


def test_arguments_broadcast_to_the_same_words_as_one_by_one() -> None:
    seeds, positions, tokens = torch.tensor([3, 1 << 62]), torch.tensor([0, 9], dtype=torch.int32), torch.arange(11)
    together = philox.gumbel(seeds[:, None], positions[:, None], tokens)  # [2, 11]
    for row in range(2):
        for token in range(11):
            assert together[row, token] == philox.gumbel(seeds[row], positions[row], tokens[token])


def test_every_key_changes_the_noise() -> None:
    def draw(seed: int, position: int, token: int, stream: int, epoch: int = 0) -> int:
        where = (torch.tensor(seed), torch.tensor(position), torch.tensor(token))
        return int(philox.philox(*where, stream, torch.tensor(epoch)))

    drawn = {draw(1, 2, 3, 0), draw(2, 2, 3, 0), draw(1 + (1 << 32), 2, 3, 0), draw(1, 3, 3, 0), draw(1, 2, 4, 0)}
    assert len(drawn | {draw(1, 2, 7, 0), draw(1, 2, 3, 1), draw(1, 2, 3, 0, 1), draw(1, 2, 3, 0, 2)}) == 9


def test_streams_differ() -> None:
    assert len({philox.TARGET, philox.DRAFT, philox.ACCEPT, philox.RESIDUAL}) == 4
    assert philox.TARGET == 0  # the noise that plain decoding has always had


def test_gumbel_has_its_mean_and_variance_and_no_infinity() -> None:
    noise = philox.gumbel(torch.tensor(7), torch.tensor(1), torch.arange(200_000)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * 200_000)
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.05


def test_the_ends_of_the_unit_interval_are_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, expected in ((0, 2.0**-25), (0xFFFFFFFF, 1 - 2.0**-25)):
        monkeypatch.setattr(philox, "philox", lambda *_, word=word: torch.tensor([word]))
        zero = torch.tensor([0])
        assert philox.uniform(zero, zero, zero).item() == expected
        assert philox.gumbel(zero, zero, zero).isfinite().all()
