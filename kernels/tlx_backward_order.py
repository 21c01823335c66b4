"""Who adds to which query tile of dQ when, and the sender warps that keep to it.

The key tiles of a (sequence, head) run on neighbouring programs at the same time and add to one FP32 sum. Each begins
at another query tile, so that they do not wait for one another, and a counter per query tile lets them add in a fixed
order: the result depends on the sequence alone. The one that comes last does not add but rounds and stores dQ.

Nothing can hang: a part waits only for parts that their tiles send at an earlier step (or, where tiles begin at the
same query tile, for earlier tiles), and a tile's neighbours are running or will be as soon as earlier work is done.
That needs every program of the launch to get a multiprocessor in the end: the grid is never larger than their number.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from .tlx_common import add_ragged, load_ragged, store_ragged, zigzag


@triton.jit
def wait_for_count(counter, count):
    """Until `count` parts have been added to a query tile of dQ; then TMA may add the next."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 v;
        AGAIN:
        ld.acquire.gpu.global.u32 v, [$1];
        shfl.sync.idx.b32 v, v, 0, 31, -1;
        setp.lt.u32 p, v, $2;
        @p bra AGAIN;
        fence.proxy.async.global;
        mov.u32 $0, v;
        }""",
        "=r,l,r",
        [counter.to(tl.uint64, bitcast=True), count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bulk_writes_done():
    """Wait until this thread's bulk stores and reductions are complete, not merely read out of shared memory."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, $1;",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def count_up(counter):
    """One part more has been added, says every lane of a sender warp (a choice of one would cost uniform registers)."""
    tl.inline_asm_elementwise(
        "bar.warp.sync -1; red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0;",
        "=r,l",
        [counter.to(tl.uint64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def entry_of(table, n, H, RESIDENT: tl.constexpr):
    """Row of the table for a program's n-th piece of work, a key tile or with RESIDENT all key tiles of a (sequence,
    head): first kv row, kv rows, first q row, q rows, first output row, first tile, key tiles, counters, index.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    index = zigzag(n, program, programs) if RESIDENT else n * programs + program
    slot = table + (index // H) * 8
    kv_first = tl.load(slot)
    kv_size = tl.load(slot + 1)
    q_first = tl.load(slot + 2)
    q_size = tl.load(slot + 3)
    out_first = tl.load(slot + 4)
    start = tl.load(slot + 5)
    tiles = tl.load(slot + 6)
    counters = tl.load(slot + 7)
    return kv_first, kv_size, q_first, q_size, out_first, start, tiles, counters, index


@triton.jit
def place_of(index, start, tiles, H, RESIDENT: tl.constexpr):
    """(head, key tile) of a table index; with RESIDENT the first key tile."""
    if RESIDENT:
        return index % H, 0
    else:
        place = index - start * H
        head = place // tiles
        return head, place - head * tiles


@triton.jit
def first_query_tile(tile, tiles, query_tiles, limit):
    """Where key tile `tile` begins: spread evenly, so that no two tiles of a sequence want one query tile at a time.

    With fewer query tiles than key tiles that cannot be, and a sequence with more key tiles than programs runs in
    several rounds: both begin at 0 everywhere, and a tile waits for earlier ones only. limit: how many tiles may.
    """
    return tl.where(tiles <= tl.minimum(limit, query_tiles), (tile * query_tiles) // tiles, 0)


@triton.jit
def parts_before(query_tile, first, tile, tiles, query_tiles, limit):
    """How many key tiles add to this query tile before `tile` does; see first_query_tile."""
    begun = ((query_tile + 1) * tiles + query_tiles - 1) // query_tiles  # key tiles that begin at or before it
    turn = tl.where(query_tile >= first, begun - 1 - tile, tiles - 1 - tile + begun)
    return tl.where(tiles <= tl.minimum(limit, query_tiles), turn, tile)


@triton.jit
def last_from(tile, tiles, query_tiles, limit):
    """From which step on `tile` is the last to add: its remaining query tiles have had all others."""
    begin = (tile * query_tiles) // tiles
    before = (tl.where(tile == 0, tiles - 1, tile - 1) * query_tiles) // tiles
    mine = tl.where(tile == 0, query_tiles - before, begin - before)
    alone = tl.where(tile == tiles - 1, 0, query_tiles)
    return tl.where(tiles <= tl.minimum(limit, query_tiles), query_tiles - mine, alone)


@triton.jit
def send_dq(
    desc_dq,
    desc_sums,
    dq_buffers,
    sum_buffers,
    sum_full,
    sum_empty,
    table,
    mine,
    counters,
    counter_stride,
    H,
    limit,
    half: tl.constexpr,
    DIRECT: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """The sender of one half of the columns: adds every part to the sum in its tile's turn."""
    QUERIES: tl.constexpr = 64
    sent = 0
    program = tl.program_id(0)
    for n in range(mine):
        _, _, _, q_size, out_first, start, tiles, counter, index = entry_of(table, n, H, RESIDENT)
        head, tile = place_of(index, start, tiles, H, RESIDENT)
        if RESIDENT:  # one part a (sequence, head), added to this program's own sum, which began as zeros
            if tiles > 0:
                tlx.barrier_arrive(sum_empty[half], 1)
                tlx.barrier_wait(sum_full[half], sent & 1)
                sent += 1
                column = head * HEAD_DIM + half * (HEAD_DIM // 2)
                add_ragged(desc_sums, sum_buffers[half], program * q_size, q_size, 0, column)
                bulk_writes_done()  # so that one program's parts are added in one order
        else:
            query_tiles = (q_size + QUERIES - 1) // QUERIES
            first = first_query_tile(tile, tiles, query_tiles, limit)
            final_from = last_from(tile, tiles, query_tiles, limit)
            place = counters + (head * 2 + half).to(tl.int64) * counter_stride + counter
            column = head * HEAD_DIM + half * (HEAD_DIM // 2)
            for i in range(query_tiles):
                m = first + i
                m = tl.where(m >= query_tiles, m - query_tiles, m)
                final = DIRECT and i >= final_from
                # A sum in chunks is no matrix of rows: each query tile has 64 rows of its own, as it has a counter.
                sum_first = (counter + m) * QUERIES if CHUNKS else out_first
                sum_size = QUERIES if CHUNKS else q_size
                sum_row = 0 if CHUNKS else m * QUERIES
                turn = parts_before(m, first, tile, tiles, query_tiles, limit)
                if DIRECT and final and tiles > 1:
                    # The last part: the sum so far comes back to the group, which rounds and sends dQ itself.
                    wait_for_count(place + m, turn * 32)
                    tlx.barrier_expect_bytes(sum_empty[half], 4 * QUERIES * (HEAD_DIM // 2))
                    load_ragged(desc_sums, sum_buffers[half], sum_empty[half], sum_first, sum_size, sum_row, column)
                else:
                    tlx.barrier_arrive(sum_empty[half], 1)
                    if turn > 0:
                        wait_for_count(place + m, turn * 32)
                tlx.barrier_wait(sum_full[half], sent & 1)
                sent += 1
                if final:
                    store_ragged(desc_dq, dq_buffers[2 * half], out_first, q_size, m * QUERIES, column)
                elif turn == 0:
                    store_ragged(desc_sums, sum_buffers[half], sum_first, sum_size, sum_row, column)
                else:
                    add_ragged(desc_sums, sum_buffers[half], sum_first, sum_size, sum_row, column)
                tlx.async_descriptor_store_wait(0)
                if tiles > 1 and not final:
                    # While the group works on the next part: this one has landed, another tile may add.
                    bulk_writes_done()
                    count_up(place + m)
    bulk_writes_done()
