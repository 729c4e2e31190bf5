// Moves KV rows between the slots of a pool, in every layer, by lists that live on the device.
//
// Row i of the list says "what slot src[i] holds goes to slot dst[i]", in every layer, as if every
// source were read before any destination is written: lists may overlap, chain and cycle. Only the
// first count[0] rows are the list; what stands behind them is never read as slots.
//
// A list is legal when
//   - 0 <= count[0] <= capacity,
//   - every slot of the list lies in [0, num_slots),
//   - no slot is the destination of two rows.
// A row with src == dst says "this slot stays". It moves nothing, may stand in the list any number
// of times and its slot may be another row's source; a row that moves something into that slot
// makes the list illegal (two rows have the same destination). Several rows may share a source.
//
// An illegal list moves nothing at all. The list is judged row by row from the front: reported is
// the first row that is illegal together with the rows in front of it, so a fault has one report
// whatever the schedule of the threads.
//
// status int32 [4], written completely by every launch of the kernels that judge, which are
// `relocate_few`, `relocate_list` and `relocate_check`:
//   [0] 0 legal; 1 count out of range; 2 source out of range; 3 destination out of range;
//       4 destination of two rows (of two faults of one row the lower number)
//   [1] the row, -1 when the fault is the count's or there is none
//   [2] low and [3] high word of the slot that is at fault (the count at code 1); of a legal list
//       1 where a row writes what another one reads, else 0
//
// Lists whose capacity is at most 32 rows take one launch, `relocate_few`, and up to 1,024 rows one
// of `relocate_list`. Longer ones take `relocate_check` and `relocate_rows`, which moves a list that
// does not overlap. For one that does, `relocate_index`, `relocate_order` and `relocate_phases`
// follow, and then, for as many columns at a time as the scratch allows, `relocate_stage` and one
// `relocate_phase` a phase; otherwise these do nothing.
//
// How a list that overlaps is ordered. A row that writes a slot must wait until that slot has been
// read: rows hang together in chains, which may close. Some rows cut their chain: their source is
// copied into the scratch before anything is written, so that nobody waits for them. What is left
// between two cuts is a stretch, moved from its end: a row's phase is its distance to the end, and
// no phase reads what it writes. Stretches of more than PHASES rows are cut again.
//
// Where rows are is said by tables of columns, uint64 [columns, 4]. A column is the part of every
// row of one pool that is moved as one:
//   [0] address of the part in slot 0
//   [1] bytes from page to page, [2] bytes from slot to slot in a page
//   [3] low 32 bits: pieces of the part; high 32 bits: bytes of a piece, 16 or 4
// All columns are disjoint; pools may differ in row size. A page is page_slots slots, a power of two.
//
// Kernels with `@early` wait for the one in front before they read anything but the tables of
// columns, which the host wrote long before. What the kernel in front may have written is no
// `__restrict__` parameter of theirs: a compiler may move a load of constant memory past the wait.
//
// All kernels: no host reads, no allocation, all addresses 64 bits wide, any grid that the
// contract allows; every buffer is the caller's.

#include "early.cuh"
#include "prefetch.cuh"
#include "shared.cuh"
#include "vector.cuh"

// most rows of a list that each warp judges by itself, a row a lane
#ifndef FEW_ROWS
#define FEW_ROWS 32
#endif
// threads of a block of such warps
#ifndef FEW_THREADS
#define FEW_THREADS 128
#endif
// pieces that a lane of them holds between reading and writing
#ifndef FEW_PIECES
#define FEW_PIECES 8
#endif
// threads of a block that judges and moves a short list
#ifndef LIST_THREADS
#define LIST_THREADS 128
#endif
// blocks of them that a multiprocessor shall hold: a limit to registers
#ifndef LIST_RESIDENT
#define LIST_RESIDENT 5
#endif
// pieces that a thread of them holds between reading and writing
#ifndef LIST_PIECES
#define LIST_PIECES 8
#endif
// longest list that is moved column by column whether its rows overlap or not
#ifndef LIST_AHEAD
#define LIST_AHEAD 128
#endif
// pieces that a lane of a group holds of a row of a longer one
#ifndef LIST_UNROLL
#define LIST_UNROLL 3
#endif
// pairs (row, column) that a group has brought into L2 while a longer list is judged
#ifndef LIST_PREFETCH
#define LIST_PREFETCH 2
#endif
// and bytes of each: more would be evicted before they are read, or never read where rows overlap
#ifndef LIST_PREFETCH_BYTES
#define LIST_PREFETCH_BYTES 768
#endif
// threads of a block that checks
#ifndef CHECK_THREADS
#define CHECK_THREADS 512
#endif
// words of marks that are swept rather than taken back one by one, whatever the list
#ifndef SWEPT_WORDS
#define SWEPT_WORDS 32768
#endif
// threads of a block that moves rows
#ifndef ROWS_THREADS
#define ROWS_THREADS 128
#endif
// blocks of them that a multiprocessor shall hold: a limit to registers
#ifndef ROWS_RESIDENT
#define ROWS_RESIDENT 6
#endif
// pieces that a lane loads before it stores any; 9 x 8 lanes x 16 bytes = a row of 1,152
#ifndef UNROLL
#define UNROLL 9
#endif
// 0 where all rows are multiples of 16 bytes: no code for others
#ifndef NARROW_ROWS
#define NARROW_ROWS 1
#endif
// neighbours on either side of a row in its chain that are asked whether the chain is cut there
#ifndef ORDER_REACH
#define ORDER_REACH 2
#endif
// launches that move the rows of a list that overlaps, for some of the columns
#ifndef PHASES
#define PHASES 3
#endif

namespace {

// Lanes that share one column of one row: their 16-byte pieces are a cache line.
constexpr unsigned LANES = 8;
constexpr unsigned WIDE = 16;  // bytes of a piece, where it is not 4
constexpr unsigned NOBODY = 0xffffffffu;
constexpr unsigned long long NO_SLOT = ~0ull;  // nor is any negative number one
constexpr unsigned ALL_LANES = 0xffffffffu;

static_assert(CHECK_THREADS % 32 == 0 && CHECK_THREADS <= 1024, "whole warps");
static_assert(ROWS_THREADS % 32 == 0 && ROWS_THREADS <= 1024, "whole warps");
static_assert(FEW_THREADS % 32 == 0 && FEW_THREADS <= 1024, "whole warps");
static_assert(FEW_ROWS <= 32 && FEW_PIECES >= 1, "a row a lane");
static_assert(LIST_THREADS % 32 == 0 && LIST_THREADS <= 1024, "whole warps");
static_assert(PHASES >= 2, "a row and the one that reads its destination move one after the other");
static_assert(LIST_UNROLL >= 1 && LIST_PREFETCH >= 1, "at least one load in flight");
static_assert(LIST_PIECES >= 1 && ORDER_REACH >= 1, "at least one");
static_assert(UNROLL >= 1, "at least one load in flight");

constexpr int LEGAL = 0;
constexpr int BAD_COUNT = 1;
constexpr int BAD_SOURCE = 2;
constexpr int BAD_DESTINATION = 3;
constexpr int DUPLICATE_DESTINATION = 4;

struct Move {
    long long from;
    long long to;
};

struct MoveList {
    const long long* src;
    const long long* dst;
    long long num_slots;

    __device__ bool holds(long long slot) const { return slot >= 0 && slot < num_slots; }
    __device__ Move operator()(unsigned, unsigned row) const { return {src[row], dst[row]}; }
};

// What rows do with a slot.
constexpr unsigned READ = 1;     // one that moves reads it
constexpr unsigned WRITTEN = 2;  // one that moves writes it
constexpr unsigned STAYS = 4;

// Four bits for each slot, in a buffer of the caller's: all zero before the launch and after it.
struct Marks {
    unsigned* words;
    unsigned long long count;  // a multiple of 4

    // Adds a mark, and returns those that the slot had. Of two rows that mark one slot the later one
    // sees the other, whichever blocks they are in: nobody has to wait for all marks.
    __device__ unsigned add(long long slot, unsigned mark) const {
        const unsigned shift = 4 * static_cast<unsigned>(slot & 7);
        return atomicOr(&words[slot >> 3], mark << shift) >> shift & 15;
    }
};

struct Seen {
    bool illegal;
    bool overlaps;
};

// Marks the rows `first`, `first + step`, ... of a list. No row with a slot out of range marks
// anything: what rows of the list conflict is only known of those in front of it.
__device__ Seen mark(const MoveList& list, const Marks& marks, unsigned first, unsigned step,
                     unsigned rows) {
    Seen seen = {false, false};
    for (unsigned row = first; row < rows; row += step) {
        const long long from = list.src[row];
        const long long to = list.dst[row];
        if (!list.holds(from) || !list.holds(to)) {
            seen.illegal = true;
        } else if (from == to) {
            seen.illegal |= (marks.add(to, STAYS) & WRITTEN) != 0;
        } else {
            const unsigned at_target = marks.add(to, WRITTEN);
            const unsigned at_source = marks.add(from, READ);
            seen.illegal |= (at_target & (WRITTEN | STAYS)) != 0;
            seen.overlaps |= (at_target & READ) != 0 || (at_source & WRITTEN) != 0;
        }
    }
    return seen;
}

// Takes all marks of the first `rows` rows back, by one block: by sweeping all words where they are
// few, which costs no load, else by going through the rows.
__device__ void clear(const MoveList& list, const Marks& marks, unsigned rows) {
    if (marks.count <= SWEPT_WORDS + 8ull * rows) {
        const uint4 zeros = {0, 0, 0, 0};
        for (unsigned long long word = 4 * threadIdx.x; word < marks.count;
             word += 4 * CHECK_THREADS) {
            store128(marks.words + word, zeros);
        }
        return;
    }
    for (unsigned row = threadIdx.x; row < rows; row += CHECK_THREADS) {
        const long long from = list.src[row];
        const long long to = list.dst[row];
        if (list.holds(from) && list.holds(to)) {
            atomicExch(&marks.words[from >> 3], 0u);
            atomicExch(&marks.words[to >> 3], 0u);
        }
    }
}

__device__ void write_status(int* status, int code, int row, long long value) {
    if (threadIdx.x == 0) {
        status[0] = code;
        status[1] = row;
        status[2] = static_cast<int>(value & 0xffffffffll);
        status[3] = static_cast<int>(value >> 32);
    }
}

// Names what is wrong with `row`, the first row that is illegal together with those in front of it.
__device__ void report(const MoveList& list, unsigned row, int* status) {
    const long long src = list.src[row];
    const long long dst = list.dst[row];
    if (!list.holds(src)) {
        write_status(status, BAD_SOURCE, row, src);
        return;
    }
    if (!list.holds(dst)) {
        write_status(status, BAD_DESTINATION, row, dst);
        return;
    }
    write_status(status, DUPLICATE_DESTINATION, row, dst);
}

// Blocks that have come to a vote, those that saw a fault, and those that saw an overlap.
constexpr unsigned long long VOTE = 1;
constexpr unsigned long long VOTE_ILLEGAL = 1ull << 21;
constexpr unsigned long long VOTE_OVERLAPS = 1ull << 42;

// Judges the list, by all blocks, and writes the verdict, by the last of them to vote.
__device__ void check(const MoveList& list, const int* count, int capacity, const Marks& marks,
                      unsigned long long* votes, unsigned long long* outcome, int* status) {
    const int length = count[0];
    const bool fits = length >= 0 && length <= capacity;
    const unsigned rows = fits ? static_cast<unsigned>(length) : 0;
    const Seen seen = mark(list, marks, blockIdx.x * CHECK_THREADS + threadIdx.x,
                           gridDim.x * CHECK_THREADS, rows);
    const bool illegal = __syncthreads_or(seen.illegal) != 0;
    const bool overlaps = __syncthreads_or(seen.overlaps) != 0;
    if (threadIdx.x == 0) {
        const unsigned long long vote =
            VOTE + (illegal ? VOTE_ILLEGAL : 0) + (overlaps ? VOTE_OVERLAPS : 0);
        __threadfence();  // the marks are there before the vote
        outcome[0] = vote + atomicAdd(votes, vote);
        __threadfence();  // and after it those of all who voted before
    }
    __syncthreads();
    const unsigned long long all = outcome[0];
    if (all % VOTE_ILLEGAL != gridDim.x) {
        return;
    }
    if (threadIdx.x == 0) {
        votes[0] = 0;
    }
    clear(list, marks, rows);
    if (!fits) {
        write_status(status, BAD_COUNT, -1, length);
        return;
    }
    if (all % VOTE_OVERLAPS < VOTE_ILLEGAL) {
        write_status(status, LEGAL, -1, all >= VOTE_OVERLAPS);
        return;
    }
    // What has an illegal front is illegal, so bisection finds the shortest such front.
    unsigned legal_rows = 0;
    unsigned illegal_rows = rows;
    while (illegal_rows - legal_rows > 1) {
        const unsigned middle = legal_rows + (illegal_rows - legal_rows) / 2;
        __syncthreads();
        const Seen front = mark(list, marks, threadIdx.x, CHECK_THREADS, middle);
        const bool fails = __syncthreads_or(front.illegal) != 0;
        (fails ? illegal_rows : legal_rows) = middle;
        clear(list, marks, middle);
    }
    report(list, illegal_rows - 1, status);
}

__device__ unsigned log2_of(int power_of_two) { return 31 - __clz(power_of_two); }

// The part of every row of a pool that is moved as one.
struct Column {
    char* base;
    unsigned long long page_stride;
    unsigned long long row_stride;
    unsigned pieces;
    unsigned width;

    Column() = default;
    __device__ Column(const unsigned long long* table, unsigned number) {
        const unsigned long long* words = table + 4ull * number;
        base = reinterpret_cast<char*>(words[0]);
        page_stride = words[1];
        row_stride = words[2];
        pieces = static_cast<unsigned>(words[3]);
        width = static_cast<unsigned>(words[3] >> 32);
    }

    __device__ char* at(long long slot, unsigned page_bits) const {
        const unsigned long long where = static_cast<unsigned long long>(slot);
        const unsigned long long inside = where & ((1ull << page_bits) - 1);
        return base + (where >> page_bits) * page_stride + inside * row_stride;
    }
};

// A piece of 16 or of 4 bytes; of the narrow one only x means something.
template <unsigned WIDTH>
__device__ uint4 load_piece(const char* address) {
    if (WIDTH == WIDE) {
        return load128(address);
    }
    uint4 value = {0, 0, 0, 0};
    value.x = *reinterpret_cast<const unsigned*>(address);
    return value;
}

template <unsigned WIDTH>
__device__ void store_piece(char* address, uint4 value) {
    if (WIDTH == WIDE) {
        store128(address, value);
    } else {
        *reinterpret_cast<unsigned*>(address) = value.x;
    }
}

__device__ bool is_wide(const Column& column) { return !NARROW_ROWS || column.width == WIDE; }

// What the lanes of a group hold of one column of one row: all loads in front of the stores, so that
// the misses of a lane overlap.
template <unsigned PIECES>
struct Held {
    uint4 piece[PIECES];

    template <unsigned WIDTH, bool WHOLE>
    __device__ void load_as(const char* source, unsigned pieces) {
        const unsigned lane = threadIdx.x % LANES;
        source += lane * WIDTH;
#pragma unroll
        for (unsigned k = 0; k < PIECES; ++k) {
            if (WHOLE || k * LANES + lane < pieces) {
                piece[k] = load_piece<WIDTH>(source + k * LANES * WIDTH);
            }
        }
    }
    template <unsigned WIDTH, bool WHOLE>
    __device__ void store_as(char* destination, unsigned pieces) const {
        const unsigned lane = threadIdx.x % LANES;
        destination += lane * WIDTH;
#pragma unroll
        for (unsigned k = 0; k < PIECES; ++k) {
            if (WHOLE || k * LANES + lane < pieces) {
                store_piece<WIDTH>(destination + k * LANES * WIDTH, piece[k]);
            }
        }
    }
    // What is behind the column's first pieces.
    __device__ void load(const char* source, const Column& column, unsigned first) {
        if (is_wide(column)) {
            load_as<WIDE, false>(source, column.pieces - first);
        } else {
            load_as<4, false>(source, column.pieces - first);
        }
    }
    __device__ void store(char* destination, const Column& column, unsigned first) const {
        if (is_wide(column)) {
            store_as<WIDE, false>(destination, column.pieces - first);
        } else {
            store_as<4, false>(destination, column.pieces - first);
        }
    }
};

// Moves a column of a row of which nobody else reads or writes anything.
template <unsigned PIECES>
__device__ void move_part(const char* source, char* destination, const Column& column) {
    if (is_wide(column) && column.pieces == LANES * PIECES) {
        Held<PIECES> held;
        held.template load_as<WIDE, true>(source, column.pieces);
        held.template store_as<WIDE, true>(destination, column.pieces);
        return;
    }
    // A few pieces at a time: tests for all of them would take the registers of the others.
    constexpr unsigned FEW = PIECES < 3 ? PIECES : 3;
    const unsigned width = is_wide(column) ? WIDE : 4;
    for (unsigned first = 0; first < column.pieces; first += FEW * LANES) {
        Held<FEW> held;
        held.load(source + first * width, column, first);
        held.store(destination + first * width, column, first);
    }
}

// Brings the first bytes of a part of a row into L2, without waiting for them; the lanes of a group
// share its lines. What others write there meanwhile is no matter: nothing is read.
__device__ void prefetch_part(const char* source, const Column& column) {
    const unsigned part = column.pieces * column.width;
    const unsigned bytes = part < LIST_PREFETCH_BYTES ? part : LIST_PREFETCH_BYTES;
    for (unsigned at = threadIdx.x % LANES * 128; at < bytes; at += LANES * 128) {
        prefetch_l2(source + at);
    }
}

// Groups of LANES threads are numbered block by block, so that a block's rows lie side by side in a
// long list, or a warp of each block by turns: then the last turn of a short one is all blocks' alike.
__device__ unsigned group_by_block(unsigned threads) {
    return (blockIdx.x * threads + threadIdx.x) / LANES;
}
__device__ unsigned group_by_turns() {
    constexpr unsigned GROUPS = 32 / LANES;  // of a warp
    return (threadIdx.x / 32 * gridDim.x + blockIdx.x) * GROUPS + threadIdx.x % 32 / LANES;
}

// A group's way through all pairs (row, column), the column fastest, in steps of the whole grid. Two
// numbers, since there can be more pairs than 32 bits count.
struct Walk {
    unsigned row;
    unsigned column;
    unsigned row_step;
    unsigned column_step;
    unsigned columns;

    __device__ Walk(unsigned group, unsigned threads, unsigned extent) {
        const unsigned groups = gridDim.x * (threads / LANES);
        row = group / extent;
        column = group % extent;
        row_step = groups / extent;
        column_step = groups % extent;
        columns = extent;
    }

    __device__ void step() {
        row += row_step;
        column += column_step;
        if (column >= columns) {
            column -= columns;
            ++row;
        }
    }
};

// Moves the pairs of a walk in a list in which nobody reads what another one writes: any order is
// right.
template <unsigned PIECES>
__device__ void move_disjoint(Walk walk, const unsigned long long* places, unsigned page_bits,
                              const long long* src, const long long* dst, unsigned rows) {
    for (; walk.row < rows; walk.step()) {
        const long long from = src[walk.row];
        const long long to = dst[walk.row];
        if (from != to) {
            const Column column(places, walk.column);
            move_part<PIECES>(column.at(from, page_bits), column.at(to, page_bits), column);
        }
    }
}

// The slots that a short list writes: a hash table in shared memory.
struct Written {
    unsigned long long* bucket;  // NO_SLOT or a slot
    unsigned buckets;            // a power of two, at least twice the rows; more are faster

    __device__ unsigned first_bucket(unsigned long long slot) const {
        const unsigned low = static_cast<unsigned>(slot);
        const unsigned high = static_cast<unsigned>(slot >> 32);
        return (((low ^ high) * 2654435769u) >> 7) & (buckets - 1);
    }

    // Enters a slot; says whether it is there.
    __device__ bool enter(unsigned long long slot) const {
        for (unsigned at = first_bucket(slot);; at = (at + 1) & (buckets - 1)) {
            const unsigned long long other = atomicCAS(&bucket[at], NO_SLOT, slot);
            if (other == NO_SLOT || other == slot) {
                return other == slot;
            }
        }
    }

    __device__ bool holds(unsigned long long slot) const {
        for (unsigned at = first_bucket(slot);; at = (at + 1) & (buckets - 1)) {
            const unsigned long long other = bucket[at];
            if (other == NO_SLOT || other == slot) {
                return other == slot;
            }
        }
    }
};

// What a thread holds of one column of all rows, between reading and writing. THREADS threads share
// the column: a block, or a warp. `moves(k, row)` gives the row of piece k.
template <unsigned PIECES, unsigned THREADS>
struct HeldColumn {
    uint4 piece[PIECES];

    // The place of piece k among those of the column; `width_bits` says how many pieces of a row the
    // column has at most.
    __device__ static unsigned place(unsigned k) { return k * THREADS + threadIdx.x % THREADS; }
    __device__ static unsigned row_of(unsigned k, unsigned width_bits) {
        return place(k) >> width_bits;
    }
    // Whether piece k of this thread is one, and where it is in its row.
    __device__ static bool has(unsigned k, const Column& column, unsigned rows, unsigned width_bits,
                               unsigned& offset) {
        offset = place(k) & ((1u << width_bits) - 1);
        return row_of(k, width_bits) < rows && offset < column.pieces;
    }
    // The list may not be judged yet: rows with a slot out of range read nothing.
    template <class Moves>
    __device__ void load(const Moves& moves, long long num_slots, const Column& column,
                         unsigned rows, unsigned width_bits, unsigned page_bits) {
#pragma unroll
        for (unsigned k = 0; k < PIECES; ++k) {
            unsigned offset;
            if (has(k, column, rows, width_bits, offset)) {
                const Move move = moves(k, row_of(k, width_bits));
                if (move.from != move.to && move.from >= 0 && move.from < num_slots) {
                    const char* source = column.at(move.from, page_bits);
                    piece[k] = is_wide(column) ? load_piece<WIDE>(source + offset * WIDE)
                                               : load_piece<4>(source + offset * 4);
                }
            }
        }
    }
    template <class Moves>
    __device__ void store(const Moves& moves, const Column& column, unsigned rows,
                          unsigned width_bits, unsigned page_bits) const {
#pragma unroll
        for (unsigned k = 0; k < PIECES; ++k) {
            unsigned offset;
            if (has(k, column, rows, width_bits, offset)) {
                const Move move = moves(k, row_of(k, width_bits));
                if (move.from != move.to) {
                    char* destination = column.at(move.to, page_bits);
                    if (is_wide(column)) {
                        store_piece<WIDE>(destination + offset * WIDE, piece[k]);
                    } else {
                        store_piece<4>(destination + offset * 4, piece[k]);
                    }
                }
            }
        }
    }
};

// A pair of a walk of which nothing is known yet: its row may stand behind the list.
struct Asked {
    unsigned row;
    long long from;
    Column column;
};

// The rows of a thread's pieces, in registers: loaded together with everything else.
template <unsigned PIECES>
struct OwnMoves {
    Move move[PIECES];

    __device__ Move operator()(unsigned k, unsigned) const { return move[k]; }
};

// Names the first row of a short list that is illegal together with those in front of it.
__device__ void report_short(const MoveList& list, unsigned rows, unsigned* first, int* status) {
    for (unsigned row = threadIdx.x; row < rows; row += LIST_THREADS) {
        const long long from = list.src[row];
        const long long to = list.dst[row];
        bool illegal = !list.holds(from) || !list.holds(to);
        for (unsigned other = 0; other < row && !illegal; ++other) {
            illegal = list.dst[other] == to && (from != to || list.src[other] != to);
        }
        if (illegal) {
            atomicMin(&first[0], row);
            break;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        report(list, first[0], status);
    }
}

// Whether there is an order to find: the list is legal, overlaps, and its length fits.
__device__ bool in_order(const int* status, const int* count, int capacity) {
    const int length = count[0];
    return status[0] == LEGAL && status[2] != 0 && length >= 0 && length <= capacity;
}

// Who writes and who reads a slot. The tables are not cleared between launches: an entry counts
// only when the row that it names says the same.
struct Index {
    const long long* src;
    const long long* dst;
    const int* writers;
    const int* readers;
    int rows;

    __device__ int writer(long long slot) const {
        const int row = writers[slot];
        return row >= 0 && row < rows && dst[row] == slot && src[row] != slot ? row : -1;
    }
    // One of the rows that read the slot, always the same one.
    __device__ int reader(long long slot) const {
        const int row = readers[slot];
        return row >= 0 && row < rows && src[row] == slot && dst[row] != slot ? row : -1;
    }
    __device__ static unsigned key(int row) { return static_cast<unsigned>(row) * 2654435769u; }

    // Whether a row that goes on a chain has the least key in its neighbourhood there. Keys of two
    // rows differ, so that every cycle is cut somewhere.
    __device__ bool is_cut(int row) const {
        int before = writer(src[row]);
        int behind = reader(dst[row]);
        for (int step = 0; step < ORDER_REACH; ++step) {
            if (before >= 0) {
                if (key(before) < key(row)) {
                    return false;
                }
                const long long slot = src[before];
                before = reader(slot) == before ? writer(slot) : -1;
            }
            if (behind >= 0) {
                if (key(behind) < key(row)) {
                    return false;
                }
                behind = reader(dst[behind]);
            }
        }
        return true;
    }
};

// Rows of a short list that a thread loads before it knows how long the list is.
constexpr unsigned OWN_ROWS = LIST_THREADS < 1024 && LIST_THREADS >= 512 ? 2 : 1;

// What a row is in the order.
constexpr int FOLLOWS = 0;  // the row that writes its source waits for it; or it stays
constexpr int STARTS = 1;   // its source is written by nobody
constexpr int STAGED = 2;   // its source is read into the scratch before anything is written

// Rows of a stretch that are counted from its end. Those further away are staged, each by itself: no
// list that anybody makes has any.
constexpr int FARTHEST = 16 * PHASES - 1;

// The columns of one round: as many as the scratch holds for what is staged. The round behind the
// last column has none.
struct Round {
    long long staged;
    unsigned first;
    unsigned columns;
    int column_bytes;

    __device__ Round(int staged_rows, long long scratch_rows, int column_bytes, int round,
                     int num_places)
        : staged(staged_rows > 1 ? staged_rows : 1), column_bytes(column_bytes) {
        const long long room = scratch_rows / staged;
        const long long begin = room * round < num_places ? room * round : num_places;
        first = static_cast<unsigned>(begin);
        columns = static_cast<unsigned>(room < num_places - begin ? room : num_places - begin);
    }
    // Where column `first + column` of a staged row is.
    __device__ long long offset(unsigned column, int place) const {
        return (column * staged + place) * column_bytes;
    }
};

}  // namespace

// Judges a list of up to 32 rows, writes `status`, and moves its rows in all columns or nothing.
//
// Launch: any number of blocks of FEW_THREADS threads, no shared memory. Every warp judges the list
// by itself, lane i row i, and moves whole columns: it reads a column of all rows before it writes
// any of it. No warp waits for another. capacity <= FEW_ROWS, capacity * column_pieces <=
// 32 * FEW_PIECES. The dead tail may be loaded, as numbers.
//
// @kernel relocate_few
// @param columns        read    uint64 [num_columns, 4]     the pools, in narrow columns
// @param num_columns    value   int32
// @param column_pieces  value   int32                       most pieces of one, a power of two
// @param page_slots     value   int32                       slots of a page, a power of two
// @param src            read    int64  [capacity]           source slots; a dead tail follows
// @param dst            read    int64  [capacity]           destination slots, likewise
// @param count          read    int32  [1]                  rows of the list
// @param capacity       value   int32                       length of both lists, at most 32
// @param num_slots      value   int64                       slots of every pool
// @param status         write   int32  [4]                  code, row, slot low word, high word
// @reach columns        update                              the pools
// @block FEW_THREADS
// @early
extern "C" __global__ void __launch_bounds__(FEW_THREADS)
    relocate_few(const unsigned long long* __restrict__ columns, int num_columns, int column_pieces,
                 int page_slots, const long long* src, const long long* dst, const int* count,
                 int capacity, long long num_slots, int* status) {
    const unsigned room = static_cast<unsigned>(capacity);
    const unsigned page_bits = log2_of(page_slots);
    const unsigned width_bits = log2_of(column_pieces);
    const unsigned lane = threadIdx.x % 32;
    unsigned number = (blockIdx.x * FEW_THREADS + threadIdx.x) / 32;
    if (number >= static_cast<unsigned>(num_columns)) {
        early::wait_for_dependency();
        return;
    }
    const bool reports = number == 0;
    const MoveList list = {src, dst, num_slots};

    Column column(columns, number);

    // Everything that does not depend on another load travels at once. What follows is not let start:
    // nothing that this kernel belongs to does.
    early::wait_for_dependency();
    const int length = count[0];
    const Move judged = lane < room ? list(0, lane) : Move{0, 0};
    using Pieces = HeldColumn<FEW_PIECES, 32>;
    OwnMoves<FEW_PIECES> own;
#pragma unroll
    for (unsigned k = 0; k < FEW_PIECES; ++k) {
        const unsigned row = Pieces::row_of(k, width_bits);
        own.move[k] = row < room ? list(k, row) : Move{0, 0};
    }
    if (length < 0 || length > capacity) {
        if (reports) {
            write_status(status, BAD_COUNT, -1, length);
        }
        return;
    }
    const unsigned rows = static_cast<unsigned>(length);
    Pieces held;
    held.load(own, num_slots, column, rows, width_bits, page_bits);

    // While the first column is on its way: who of the rows in front has the same destination?
    const bool listed = lane < rows;
    const bool moving = listed && judged.from != judged.to;
    const unsigned movers = __ballot_sync(ALL_LANES, moving);
    const unsigned alike = __match_any_sync(ALL_LANES, judged.to) & ((1u << lane) - 1);
    const bool again = (moving ? alike : alike & movers) != 0;
    const bool inside = list.holds(judged.from) && list.holds(judged.to);
    const unsigned illegal = __ballot_sync(ALL_LANES, listed && (!inside || again));
    if (illegal != 0) {
        if (reports) {
            report(list, __ffs(illegal) - 1, status);
        }
        return;
    }
    while (true) {
        __syncwarp();  // all lanes have read the column
        held.store(own, column, rows, width_bits, page_bits);
        number += gridDim.x * (FEW_THREADS / 32);
        if (number >= static_cast<unsigned>(num_columns)) {
            break;
        }
        column = Column(columns, number);
        held.load(own, num_slots, column, rows, width_bits, page_bits);
    }
    if (reports) {
        bool overlaps = false;
        for (unsigned row = 0; row < rows; ++row) {
            const bool written = __shfl_sync(ALL_LANES, judged.to, row) == judged.from;
            overlaps |= written && moving && (movers >> row & 1) != 0;
        }
        write_status(status, LEGAL, -1, __any_sync(ALL_LANES, overlaps) != 0);
    }
}

// Judges a list of up to 1,024 rows, writes `status`, and moves its rows in all columns or nothing.
//
// Launch: any number of blocks of LIST_THREADS threads. Every block judges the list by itself, in
// shared memory: the list, and a hash table of `buckets` slots. All come to one verdict, so that no
// block waits for another. A list of up to LIST_AHEAD rows is moved column by column: a block reads
// a column of all rows before it writes any of it, and loads the first while it judges. So is a
// longer list that overlaps; one that does not is moved row by row. capacity * column_pieces <=
// LIST_THREADS * LIST_PIECES; columns and places cover the same bytes, those of `columns` in at most
// column_pieces pieces, those of `places` in at most 8 * LIST_UNROLL. The first slots of the dead
// tail may be loaded, as numbers.
//
// @kernel relocate_list
// @param columns        read    uint64 [num_columns, 4]     the pools, in narrow columns
// @param num_columns    value   int32
// @param column_pieces  value   int32                       most pieces of one, a power of two
// @param places         read    uint64 [num_places, 4]      the pools, in wide columns
// @param num_places     value   int32
// @param page_slots     value   int32                       slots of a page, a power of two
// @param src            read    int64  [capacity]           source slots; a dead tail follows
// @param dst            read    int64  [capacity]           destination slots, likewise
// @param count          read    int32  [1]                  rows of the list
// @param capacity       value   int32                       length of both lists, at most 1,024
// @param num_slots      value   int64                       slots of every pool
// @param buckets        value   int32                       a power of two, at least 2 * capacity
// @param status         write   int32  [4]                  code, row, slot low word, high word
// @reach columns        update                              the pools
// @reach places         update                              the pools
// @block LIST_THREADS
// @shared 16 + 16 * (capacity + capacity % 2) + 8 * buckets
extern "C" __global__ void __launch_bounds__(LIST_THREADS, LIST_RESIDENT)
    relocate_list(const unsigned long long* __restrict__ columns, int num_columns,
                  int column_pieces, const unsigned long long* __restrict__ places, int num_places,
                  int page_slots, const long long* __restrict__ src,
                  const long long* __restrict__ dst, const int* __restrict__ count, int capacity,
                  long long num_slots, int buckets, int* status) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, unsigned, first, 1);
    CARVE(cursor, long long, from, capacity);
    CARVE(cursor, long long, to, capacity);
    CARVE(cursor, unsigned long long, bucket, buckets);
    const Written written = {bucket, static_cast<unsigned>(buckets)};
    const MoveList given = {src, dst, num_slots};
    const MoveList slots = {from, to, num_slots};
    const unsigned page_bits = log2_of(page_slots);
    const unsigned width_bits = log2_of(column_pieces);
    unsigned number = blockIdx.x;
    const unsigned end = static_cast<unsigned>(num_columns);
    Column column(columns, number < end ? number : 0);

    // Everything that does not depend on another load travels at once: a short list is all latency.
    const int length = count[0];
    const unsigned room = static_cast<unsigned>(capacity);
    const bool by_column = capacity <= LIST_AHEAD;
    const Walk walk(group_by_turns(), LIST_THREADS, static_cast<unsigned>(num_places));
    Move own[OWN_ROWS];
#pragma unroll
    for (unsigned k = 0; k < OWN_ROWS; ++k) {
        const unsigned row = k * LIST_THREADS + threadIdx.x;
        own[k] = row < room ? given(k, row) : Move{0, 0};
    }
    Asked asked[LIST_PREFETCH];
    if (!by_column) {
        Walk ahead = walk;
#pragma unroll
        for (int k = 0; k < LIST_PREFETCH; ++k, ahead.step()) {
            asked[k].row = ahead.row;
            asked[k].from = ahead.row < room ? src[ahead.row] : -1;
            asked[k].column = Column(places, ahead.column);
        }
    }
    for (unsigned at = threadIdx.x; at < written.buckets; at += LIST_THREADS) {
        bucket[at] = NO_SLOT;
    }
    if (threadIdx.x == 0) {
        first[0] = NOBODY;
    }
    __syncthreads();  // while the list is on its way
    if (length < 0 || length > capacity) {
        if (blockIdx.x == 0) {
            write_status(status, BAD_COUNT, -1, length);
        }
        return;
    }
    const unsigned rows = static_cast<unsigned>(length);
    HeldColumn<LIST_PIECES, LIST_THREADS> held;
    if (by_column && number < end) {
        held.load(given, num_slots, column, rows, width_bits, page_bits);
    }
    if (!by_column) {
        // Not into registers: who judges sooner may write what is read here, if the rows overlap.
#pragma unroll
        for (int k = 0; k < LIST_PREFETCH; ++k) {
            if (asked[k].row < rows && given.holds(asked[k].from)) {
                const Column& part = asked[k].column;
                prefetch_part(part.at(asked[k].from, page_bits), part);
            }
        }
    }

    bool illegal = false;
    const auto take = [&](unsigned row, const Move& move) {
        from[row] = move.from;
        to[row] = move.to;
        if (!given.holds(move.from) || !given.holds(move.to)) {
            illegal = true;
        } else if (move.from != move.to) {
            illegal |= written.enter(move.to);
        }
    };
#pragma unroll
    for (unsigned k = 0; k < OWN_ROWS; ++k) {
        const unsigned row = k * LIST_THREADS + threadIdx.x;
        if (row < rows) {
            take(row, own[k]);
        }
    }
    for (unsigned row = OWN_ROWS * LIST_THREADS + threadIdx.x; row < rows; row += LIST_THREADS) {
        take(row, given(0, row));
    }
    __syncthreads();
    bool overlaps = false;
    for (unsigned row = threadIdx.x; row < rows; row += LIST_THREADS) {
        if (written.holds(from[row])) {
            illegal |= from[row] == to[row];
            overlaps |= from[row] != to[row];
        }
    }
    if (__syncthreads_or(illegal) != 0) {
        if (blockIdx.x == 0) {
            report_short(given, rows, first, status);
        }
        return;
    }
    // Who moves column by column need not know whether rows overlap, and says so last.
    if (!by_column) {
        overlaps = __syncthreads_or(overlaps) != 0;
    }
    if (!by_column && !overlaps) {
        move_disjoint<LIST_UNROLL>(walk, places, page_bits, from, to, rows);
    } else {
        // The barriers of the verdict stand between the loads of the first column and its stores.
        bool loaded = by_column;
        for (; number < end; number += gridDim.x) {
            if (!loaded) {
                column = Column(columns, number);
                held.load(slots, num_slots, column, rows, width_bits, page_bits);
                // The next column comes into L2 while this one is waited for and written.
                if (number + gridDim.x < end) {
                    const Column next(columns, number + gridDim.x);
                    for (unsigned row = threadIdx.x; row < rows; row += LIST_THREADS) {
                        if (from[row] != to[row]) {
                            prefetch_l2(next.at(from[row], page_bits));
                        }
                    }
                }
                __syncthreads();
            }
            held.store(slots, column, rows, width_bits, page_bits);
            loaded = false;
        }
    }
    if (blockIdx.x == 0) {
        overlaps = __syncthreads_or(overlaps) != 0;
        write_status(status, LEGAL, -1, overlaps);
    }
}

// Judges one long list and writes `status`. Must run, on one stream, before the kernels below.
//
// Launch: any number of blocks of CHECK_THREADS threads, below 2^21. Every row leaves marks at its
// slots, four bits a slot, and sees those that were there; blocks vote, and the last to do so writes
// the verdict and takes the marks back. `marks` and `votes` belong to the caller, are all zero before
// the launch and are left all zero also when the list is illegal, so that a captured step needs no
// memset. One pass over the list where it is legal; a fault costs about log2(count) more, by one
// block. Lists and count are read only.
//
// @kernel relocate_check
// @param src        read    int64  [capacity]                 source slots; a dead tail follows
// @param dst        read    int64  [capacity]                 destination slots, likewise
// @param count      read    int32  [1]                        rows of the list
// @param capacity   value   int32                             length of both lists
// @param num_slots  value   int64                             slots of every pool
// @param marks      update  uint32 [4 * ceil_div(num_slots, 32)] align=16   zero again after
// @param votes      update  uint64 [1]                        likewise
// @param status     write   int32  [4]                        code, row, slot low word, high word
// @block CHECK_THREADS
// @early
extern "C" __global__ void __launch_bounds__(CHECK_THREADS)
    relocate_check(const long long* src, const long long* dst, const int* count, int capacity,
                   long long num_slots, unsigned* marks, unsigned long long* votes, int* status) {
    SHARED_ARRAY(unsigned long long, outcome, [1]);
    early::launch_dependents();
    early::wait_for_dependency();
    const unsigned long long words = 4 * ((static_cast<unsigned long long>(num_slots) + 31) / 32);
    check({src, dst, num_slots}, count, capacity, {marks, words}, votes, outcome, status);
}

// Enters every row of a list that overlaps in two tables by slot: who writes it, who reads it.
// Where several rows read a slot any one of them stays.
//
// Launch: any number of blocks of ROWS_THREADS threads, after `relocate_check`. Nothing is written
// where the list is illegal or does not overlap.
//
// @kernel relocate_index
// @param src       read    int64  [capacity]
// @param dst       read    int64  [capacity]
// @param count     read    int32  [1]
// @param capacity  value   int32
// @param num_slots value   int64
// @param status    read    int32  [4]           the verdict of relocate_check
// @param writers   update  int32  [num_slots]   any content before; valid where the row says so
// @param readers   update  int32  [num_slots]   likewise
// @param counts    update  int32  [PHASES + 1]   cleared
// @block ROWS_THREADS
// @early
extern "C" __global__ void __launch_bounds__(ROWS_THREADS)
    relocate_index(const long long* src, const long long* dst, const int* count, int capacity,
                   long long num_slots, const int* status, int* writers, int* readers,
                   int* counts) {
    early::launch_dependents();
    early::wait_for_dependency();
    if (!in_order(status, count, capacity)) {
        return;
    }
    if (blockIdx.x == 0 && threadIdx.x <= PHASES) {
        counts[threadIdx.x] = 0;
    }
    const int rows = count[0];
    for (int row = blockIdx.x * ROWS_THREADS + threadIdx.x; row < rows;
         row += gridDim.x * ROWS_THREADS) {
        if (src[row] != dst[row]) {
            writers[dst[row]] = row;
            atomicExch(&readers[src[row]], row);
        }
    }
}

// Says of every row of a list that overlaps whether it cuts its chain: `order` int32 [capacity, 2],
// what it is (0 waits or stays, 1 its source is written by nobody, 2 it cuts) and the row that
// reads its destination, -1 where none does.
//
// Launch: any number of blocks of ROWS_THREADS threads, after `relocate_index`. On average every
// (2 * ORDER_REACH + 1)-th row of a chain cuts it. Of the readers of a slot all but one do.
//
// @kernel relocate_order
// @param src       read    int64  [capacity]
// @param dst       read    int64  [capacity]
// @param count     read    int32  [1]
// @param capacity  value   int32
// @param num_slots value   int64
// @param status    read    int32  [4]
// @param writers   read    int32  [num_slots]
// @param readers   read    int32  [num_slots]
// @param order     update  int32  [capacity, 2]   written as far as the list reaches
// @block ROWS_THREADS
// @early
extern "C" __global__ void __launch_bounds__(ROWS_THREADS)
    relocate_order(const long long* src, const long long* dst, const int* count, int capacity,
                   long long num_slots, const int* status, const int* writers, const int* readers,
                   int* order) {
    early::launch_dependents();
    early::wait_for_dependency();
    if (!in_order(status, count, capacity)) {
        return;
    }
    const Index index = {src, dst, writers, readers, count[0]};
    for (int row = blockIdx.x * ROWS_THREADS + threadIdx.x; row < index.rows;
         row += gridDim.x * ROWS_THREADS) {
        int what = FOLLOWS;
        int next = -1;
        if (src[row] != dst[row]) {
            next = index.reader(dst[row]);
            if (index.writer(src[row]) < 0) {
                what = STARTS;
            } else if (index.reader(src[row]) != row || index.is_cut(row)) {
                what = STAGED;
            }
        }
        order[2 * row] = what;
        order[2 * row + 1] = next;
    }
}

// Lists the rows of each phase, and those that are staged.
//
// Launch: any number of blocks of ROWS_THREADS threads, after `relocate_order`. The lists are in any
// order; each row that moves is in one of them.
//
// @kernel relocate_phases
// @param src       read    int64  [capacity]
// @param dst       read    int64  [capacity]
// @param count     read    int32  [1]
// @param capacity  value   int32
// @param status    read    int32  [4]
// @param order     read    int32  [capacity, 2]
// @param counts    update  int32  [PHASES + 1]             rows of each phase, and staged ones
// @param phases    update  int32  [PHASES, capacity, 2]    a row, and its place in the scratch or -1
// @param staged    update  int32  [capacity]               the row in each place
// @block ROWS_THREADS
// @early
extern "C" __global__ void __launch_bounds__(ROWS_THREADS)
    relocate_phases(const long long* src, const long long* dst, const int* count, int capacity,
                    const int* status, const int* order, int* counts, int* phases, int* staged) {
    early::launch_dependents();
    early::wait_for_dependency();
    if (!in_order(status, count, capacity)) {
        return;
    }
    for (int row = blockIdx.x * ROWS_THREADS + threadIdx.x; row < count[0];
         row += gridDim.x * ROWS_THREADS) {
        if (src[row] == dst[row]) {
            continue;
        }
        int behind = 0;
        for (int next = order[2 * row + 1];
             behind <= FARTHEST && next >= 0 && order[2 * next] == FOLLOWS;
             next = order[2 * next + 1]) {
            ++behind;
        }
        const bool far = behind > FARTHEST;
        const int phase = far ? 0 : behind % PHASES;
        int place = -1;
        // The row in front of the last one of a phase's turn need not wait for it: it is staged.
        if (order[2 * row] == STAGED ||
            (order[2 * row] == FOLLOWS && (far || phase == PHASES - 1))) {
            place = atomicAdd(&counts[PHASES], 1);
            staged[place] = row;
        }
        const long long at =
            static_cast<long long>(phase) * capacity + atomicAdd(&counts[phase], 1);
        phases[2 * at] = row;
        phases[2 * at + 1] = place;
    }
}

// Copies the sources of staged rows into the scratch, for the columns of one round.
//
// Launch: any number of blocks of ROWS_THREADS threads, after `relocate_phases`. With room for
// scratch_rows >= capacity rows of one column, ceil(num_places / floor(scratch_rows / capacity))
// rounds take all columns, whatever the list; where less is staged the last ones have nothing to do.
//
// @kernel relocate_stage
// @param places        read    uint64 [num_places, 4]
// @param num_places    value   int32                    columns of the pools
// @param round         value   int32
// @param page_slots    value   int32
// @param src           read    int64  [capacity]
// @param count         read    int32  [1]
// @param capacity      value   int32
// @param status        read    int32  [4]
// @param counts        read    int32  [PHASES + 1]
// @param staged        read    int32  [capacity]
// @param column_bytes  value   int32                    of one column of one row, a multiple of 16
// @param scratch_rows  value   int64
// @param scratch       scratch uint8  [scratch_rows * column_bytes] align=16
// @reach places        update
// @block ROWS_THREADS
// @early
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, ROWS_RESIDENT)
    relocate_stage(const unsigned long long* __restrict__ places, int num_places, int round,
                   int page_slots, const long long* src, const int* count, int capacity,
                   const int* status, const int* counts, const int* staged, int column_bytes,
                   long long scratch_rows, unsigned char* scratch) {
    early::launch_dependents();
    early::wait_for_dependency();
    if (!in_order(status, count, capacity)) {
        return;
    }
    const int rows = counts[PHASES];
    const Round part(rows, scratch_rows, column_bytes, round, num_places);
    if (part.columns == 0) {
        return;
    }
    for (Walk walk(group_by_block(ROWS_THREADS), ROWS_THREADS, part.columns);
         walk.row < static_cast<unsigned>(rows); walk.step()) {
        const Column column(places, part.first + walk.column);
        move_part<UNROLL>(column.at(src[staged[walk.row]], log2_of(page_slots)),
                          reinterpret_cast<char*>(scratch) + part.offset(walk.column, walk.row),
                          column);
    }
}

// Moves the rows of one phase, in the columns of one round, after `relocate_stage` for it and all
// phases before.
//
// Launch: any number of blocks of ROWS_THREADS threads.
//
// @kernel relocate_phase
// @param places        read    uint64 [num_places, 4]
// @param num_places    value   int32
// @param round         value   int32
// @param phase         value   int32                    from 0 on
// @param page_slots    value   int32
// @param src           read    int64  [capacity]
// @param dst           read    int64  [capacity]
// @param count         read    int32  [1]
// @param capacity      value   int32
// @param status        read    int32  [4]
// @param counts        read    int32  [PHASES + 1]
// @param phases        read    int32  [PHASES, capacity, 2]
// @param column_bytes  value   int32
// @param scratch_rows  value   int64
// @param scratch       read    uint8  [scratch_rows * column_bytes] align=16
// @reach places        update
// @block ROWS_THREADS
// @early
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, ROWS_RESIDENT)
    relocate_phase(const unsigned long long* __restrict__ places, int num_places, int round,
                   int phase, int page_slots, const long long* src, const long long* dst,
                   const int* count, int capacity, const int* status, const int* counts,
                   const int* phases, int column_bytes, long long scratch_rows,
                   const unsigned char* scratch) {
    early::launch_dependents();
    early::wait_for_dependency();
    if (!in_order(status, count, capacity)) {
        return;
    }
    const Round part(counts[PHASES], scratch_rows, column_bytes, round, num_places);
    if (part.columns == 0) {
        return;
    }
    const unsigned page_bits = log2_of(page_slots);
    const int* listed = phases + 2ll * phase * capacity;
    for (Walk walk(group_by_block(ROWS_THREADS), ROWS_THREADS, part.columns);
         walk.row < static_cast<unsigned>(counts[phase]); walk.step()) {
        const int row = listed[2 * walk.row];
        const int place = listed[2 * walk.row + 1];
        const Column column(places, part.first + walk.column);
        const char* source =
            place < 0 ? column.at(src[row], page_bits)
                      : reinterpret_cast<const char*>(scratch) + part.offset(walk.column, place);
        move_part<UNROLL>(source, column.at(dst[row], page_bits), column);
    }
}

// Moves the rows of a list that `relocate_check` found legal and that does not overlap.
//
// Launch: any number of blocks of ROWS_THREADS threads; the grid need not know the list's length.
// No shared memory. Groups of 8 lanes move one column of one row each and stride over (row, column)
// pairs. Bytes between rows stay untouched. Where status[0] is not 0, the list overlaps, or count[0]
// does not fit it, nothing is written.
//
// @kernel relocate_rows
// @param places        read    uint64 [num_places, 4]   columns of at most 8 * UNROLL pieces
// @param num_places    value   int32                    columns of the pools, at least 1
// @param page_slots    value   int32                    slots of a page, a power of two
// @param src           read    int64  [capacity]        source slots; a dead tail follows
// @param dst           read    int64  [capacity]        destination slots, likewise
// @param count         read    int32  [1]               rows of the list
// @param capacity      value   int32                    length of src and dst
// @param status        read    int32  [4]               the verdict of relocate_check
// @reach places        update                           the pools
// @block ROWS_THREADS
// @early
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, ROWS_RESIDENT)
    relocate_rows(const unsigned long long* __restrict__ places, int num_places, int page_slots,
                  const long long* src, const long long* dst, const int* count, int capacity,
                  const int* status) {
    early::launch_dependents();
    early::wait_for_dependency();
    const int length = count[0];
    if (status[0] != LEGAL || status[2] != 0 || length < 0 || length > capacity) {
        return;
    }
    const Walk walk(group_by_block(ROWS_THREADS), ROWS_THREADS, static_cast<unsigned>(num_places));
    move_disjoint<UNROLL>(walk, places, log2_of(page_slots), src, dst,
                          static_cast<unsigned>(length));
}
