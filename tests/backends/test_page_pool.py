"""Pages are assigned to one slot at a time, and all of them come back."""

import random

from megakernel_tts.backends.page_pool import PagePool

SIZE, SLOT_PAGES = 8, 5


def _pool(num_pages: int, num_slots: int) -> PagePool:
    return PagePool(
        num_pages, num_slots, page_size=SIZE, slot_pages=SLOT_PAGES, num_columns=SLOT_PAGES + 2
    )


def _check(pool: PagePool, num_slots: int) -> None:
    """Every page is free or has one owner, and the table says which."""
    owned = [page for slot in range(num_slots) for page in pool.pages(slot)]
    assert len({*owned, *pool._free}) == len(owned) + pool.num_free == pool.num_pages
    for slot in range(num_slots):
        pages = [*pool.pages(slot)]
        assert pool.table[slot, : len(pages)].tolist() == pages
        assert pool.num_positions(slot) == SIZE * len(pages)


def test_no_page_has_two_owners_and_none_is_lost() -> None:
    rng, num_slots = random.Random(0), 6
    pool = _pool(13, num_slots)
    num_refused = 0
    for _ in range(3000):
        slot, before = rng.randrange(num_slots), pool.table.copy()
        kept, num_changes = [*pool.pages(slot)], pool.num_changes
        if rng.random() < 0.3:
            pool.release(slot)
            assert not pool.pages(slot)
        else:
            wanted = rng.randint(1, SIZE * SLOT_PAGES)
            beginning = not kept and rng.random() < 0.5
            others = [len(pool.pages(i)) for i in range(num_slots) if i != slot]
            num_spare = sum(0 < count < SLOT_PAGES for count in others) if beginning else 0
            num_missing = -(-wanted // SIZE) - len(kept)
            fits = num_missing <= 0 or num_missing + num_spare <= pool.num_free
            granted = pool.reserve(slot, wanted, beginning=beginning)
            assert granted == fits
            if granted:
                assert pool.num_positions(slot) >= wanted
                assert [*pool.pages(slot)][: len(kept)] == kept, "a stream's pages do not move"
            else:
                assert [*pool.pages(slot)] == kept, "all pages or none"
                num_refused += 1
        assert pool.num_changes > num_changes or (pool.table == before).all()
        _check(pool, num_slots)
    assert num_refused > 100
    for slot in range(num_slots):
        pool.release(slot)
    assert pool.num_free == 13


def test_a_stream_that_gets_the_pages_of_the_last_one_leaves_the_table_alone() -> None:
    """So that the table need not be copied to the device before the first prefill of a stream."""
    pool = _pool(4, 2)
    for _ in range(3):
        assert pool.reserve(1, SIZE)
        pool.release(1)
    assert pool.num_changes == 1


def test_a_slot_keeps_what_it_has_for_fewer_positions() -> None:
    pool = _pool(4, 1)
    assert pool.reserve(0, 3 * SIZE) and pool.reserve(0, 1)
    assert len(pool.pages(0)) == 3 and pool.num_changes == 1


def test_a_stream_that_begins_leaves_a_page_to_every_other_that_may_grow() -> None:
    pool = _pool(8, 4)
    assert pool.reserve(0, 1, beginning=True) and pool.reserve(1, SIZE * SLOT_PAGES)
    assert not pool.reserve(2, SIZE + 1, beginning=True), "two of two pages, and slot 0 may grow"
    assert pool.reserve(2, SIZE, beginning=True), "slot 1 has all that it can use"
    assert not pool.reserve(3, 1, beginning=True)
    assert pool.reserve(0, SIZE + 1), "a stream that speaks takes the last page"


def test_memory_for_all_slots_is_never_refused() -> None:
    """Whatever the others have, a stream may begin with a prompt of any length."""
    rng, num_slots = random.Random(1), 5
    pool = _pool(num_slots * SLOT_PAGES, num_slots)
    for _ in range(1000):
        slot = rng.randrange(num_slots)
        if pool.pages(slot) and rng.random() < 0.4:
            pool.release(slot)
        beginning = not pool.pages(slot)
        assert pool.reserve(slot, rng.randint(1, SIZE * SLOT_PAGES), beginning=beginning)


def test_a_slot_begins_with_the_page_in_which_the_last_freed_slot_began() -> None:
    """It may hold the prefix of the next stream."""
    pool = _pool(9, 2)
    assert pool.reserve(0, 3 * SIZE)
    first = pool.pages(0)[0]
    assert pool.reserve(1, 2 * SIZE) and first not in pool.pages(1)
    pool.release(0)
    assert pool.reserve(1, 4 * SIZE) and first not in pool.pages(1)
    assert pool.reserve(0, 1)
    assert pool.pages(0)[0] == first
