// Moves KV rows between the slots of a pool, in every layer, by lists that live on the device.
//
// A step that moves rows launches two kernels on one stream, `relocate_check` and then
// `relocate_rows`. Row i of the list says "what slot src[i] holds goes to slot dst[i]", in every
// layer. Only the first count[0] rows are the list; what stands behind them is never read as slots.
//
// A list is legal when
//   - 0 <= count[0] <= capacity,
//   - every slot of the list lies in [0, num_slots),
//   - no slot is the destination of two rows,
//   - no slot is the source of one row and the destination of another: nothing that is read is
//     written, so the result is that of "read every source, then write every destination".
// A row with src == dst says "this slot stays". It moves nothing, may stand in the list any number
// of times and its slot may be another row's source; a row that moves something into that slot
// makes the list illegal (two rows have the same destination). Several rows may share a source.
//
// An illegal list moves nothing at all. The list is judged row by row from the front: reported is
// the first row that is illegal together with the rows in front of it, so a fault has one report
// whatever the schedule of the threads.
//
// status int32 [4], written completely by every launch of `relocate_check`:
//   [0] 0 legal; 1 count out of range; 2 source out of range; 3 destination out of range;
//       4 destination of two rows; 5 source of one row and destination of another
//       (of two faults of one row the lower number)
//   [1] the row, -1 when the fault is the count's or there is none
//   [2] low and [3] high word of the slot that is at fault (the count at code 1; 0 when legal)
//
// Both kernels: no host reads, no allocation, all addresses 64 bits wide, any grid that the
// contract allows; every buffer is the caller's.

#include "shared.cuh"
#include "vector.cuh"

// threads of the one block that checks
#ifndef CHECK_THREADS
#define CHECK_THREADS 1024
#endif
// list rows that a thread of the check has in flight
#ifndef CHECK_UNROLL
#define CHECK_UNROLL 4
#endif
// those of them that it loads before it knows how long the list is
#ifndef CHECK_AHEAD
#define CHECK_AHEAD 1
#endif
// threads of a block that moves rows
#ifndef ROWS_THREADS
#define ROWS_THREADS 128
#endif
// blocks of them that a multiprocessor shall hold: a limit to registers
#ifndef ROWS_RESIDENT
#define ROWS_RESIDENT 6
#endif
// 16-byte pieces that a lane loads before it stores any; 9 x 8 lanes x 16 bytes = a row of 1,152
#ifndef UNROLL
#define UNROLL 9
#endif

namespace {

// Lanes that share one row of one layer: their 16-byte pieces are a cache line.
constexpr unsigned LANES = 8;
constexpr unsigned PIECE = 16;

static_assert(CHECK_THREADS % 32 == 0 && CHECK_THREADS <= 1024, "whole warps, one block");
static_assert(ROWS_THREADS % 32 == 0 && ROWS_THREADS <= 1024, "whole warps");
static_assert(CHECK_UNROLL >= 1 && UNROLL >= 1, "at least one load in flight");
static_assert(CHECK_AHEAD >= 0 && CHECK_AHEAD <= CHECK_UNROLL, "a part of the first batch");

constexpr int LEGAL = 0;
constexpr int BAD_COUNT = 1;
constexpr int BAD_SOURCE = 2;
constexpr int BAD_DESTINATION = 3;
constexpr int DUPLICATE_DESTINATION = 4;
constexpr int OVERLAP = 5;

struct MoveList {
    const long long* src;
    const long long* dst;
    long long num_slots;

    __device__ bool holds(long long slot) const { return slot >= 0 && slot < num_slots; }
};

constexpr unsigned CHECK_STEP = CHECK_THREADS * CHECK_UNROLL;

// One end, source or destination, of CHECK_UNROLL rows of one thread: `first`,
// `first + CHECK_THREADS`, ... All loads are issued before the first of them is needed.
struct Slots {
    long long at[CHECK_UNROLL];

    // Loads those of the rows BEGIN to END of the batch that are below `limit`.
    template <int BEGIN, int END>
    __device__ void load(const long long* list, unsigned first, unsigned limit) {
#pragma unroll
        for (int k = BEGIN; k < END; ++k) {
            const unsigned row = first + k * CHECK_THREADS;
            at[k] = row < limit ? list[row] : 0;
        }
    }
};

// The thread's first batch, which stays in registers. Of its first CHECK_AHEAD rows it may hold
// what stands behind the list: whoever uses a row asks first whether it belongs to the list.
struct Head {
    Slots src;
    Slots dst;

    template <int BEGIN, int END>
    __device__ void load(const MoveList& list, unsigned limit) {
        src.load<BEGIN, END>(list.src, threadIdx.x, limit);
        dst.load<BEGIN, END>(list.dst, threadIdx.x, limit);
    }
};

__device__ Slots batch_of(const Slots& head, const long long* list, unsigned first, unsigned rows) {
    Slots batch = head;
    if (first >= CHECK_STEP) {
        batch.load<0, CHECK_UNROLL>(list, first, rows);
    }
    return batch;
}

__device__ unsigned bit_of(long long slot) { return 1u << (slot & 31); }

// One bit a slot, in the block's shared memory. Cleared by sweeping it: that is over before the
// first rows arrive.
struct SharedMarks {
    static constexpr bool OUTLIVES_LAUNCH = false;
    unsigned* words;
    unsigned count;  // a multiple of 4

    __device__ void clear() const {
        const uint4 zeros = {0, 0, 0, 0};
        for (unsigned word = 4 * threadIdx.x; word < count; word += 4 * CHECK_THREADS) {
            store128(words + word, zeros);
        }
    }
    __device__ void clear(const MoveList&, const Head&, unsigned) const { clear(); }
};

// One bit a slot, in a buffer of the caller's, all zero before the launch and after it. Cleared by
// taking back what a list has marked.
struct GlobalMarks {
    static constexpr bool OUTLIVES_LAUNCH = true;
    unsigned* words;

    __device__ void clear() const {}
    __device__ void clear(const MoveList& list, const Head& head, unsigned rows) const {
        for (unsigned first = threadIdx.x; first < rows; first += CHECK_STEP) {
            const Slots dst = batch_of(head.dst, list.dst, first, rows);
#pragma unroll
            for (unsigned k = 0; k < CHECK_UNROLL; ++k) {
                if (first + k * CHECK_THREADS < rows && list.holds(dst.at[k])) {
                    atomicAnd(&words[dst.at[k] >> 5], ~bit_of(dst.at[k]));
                }
            }
        }
    }
};

struct Verdict {
    bool illegal;      // the block's
    unsigned outside;  // this thread's first row with a slot out of range, else `rows`
};

// Judges the first `rows` rows as a set. Every thread of the block calls it, the marks cleared. No
// row with a slot out of range marks anything: what rows of the list conflict is only known of
// those in front of it. What the atomics and the probes answer is looked at after the last of a
// batch is on its way.
template <class Marks>
__device__ Verdict judge(const MoveList& list, const Head& head, unsigned rows,
                         const Marks& marks) {
    __syncthreads();
    bool conflict = false;
    unsigned outside = rows;
    for (unsigned first = threadIdx.x; first < rows; first += CHECK_STEP) {
        const Slots src = batch_of(head.src, list.src, first, rows);
        const Slots dst = batch_of(head.dst, list.dst, first, rows);
        unsigned before[CHECK_UNROLL];
#pragma unroll
        for (unsigned k = 0; k < CHECK_UNROLL; ++k) {
            const unsigned row = first + k * CHECK_THREADS;
            const bool inside = list.holds(src.at[k]) && list.holds(dst.at[k]);
            before[k] = 0;
            if (row < rows && !inside) {
                outside = row < outside ? row : outside;
            } else if (row < rows && src.at[k] != dst.at[k]) {
                before[k] = atomicOr(&marks.words[dst.at[k] >> 5], bit_of(dst.at[k]));
            }
        }
#pragma unroll
        for (unsigned k = 0; k < CHECK_UNROLL; ++k) {
            conflict |= (before[k] & bit_of(dst.at[k])) != 0;
        }
    }
    __syncthreads();
    // A marked source is another row's destination; where src == dst it is a second destination.
    for (unsigned first = threadIdx.x; first < rows; first += CHECK_STEP) {
        const Slots src = batch_of(head.src, list.src, first, rows);
        unsigned found[CHECK_UNROLL];
#pragma unroll
        for (unsigned k = 0; k < CHECK_UNROLL; ++k) {
            const bool probed = first + k * CHECK_THREADS < rows && list.holds(src.at[k]);
            found[k] = probed ? marks.words[src.at[k] >> 5] : 0;
        }
#pragma unroll
        for (unsigned k = 0; k < CHECK_UNROLL; ++k) {
            conflict |= (found[k] & bit_of(src.at[k])) != 0;
        }
    }
    return {__syncthreads_or(conflict || outside < rows) != 0, outside};
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
__device__ void report(const MoveList& list, const Head& head, unsigned row, int* status) {
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
    bool duplicate = false;
    bool overwritten = false;
    for (unsigned first = threadIdx.x; first < row; first += CHECK_STEP) {
        const Slots from = batch_of(head.src, list.src, first, row);
        const Slots to = batch_of(head.dst, list.dst, first, row);
#pragma unroll
        for (unsigned k = 0; k < CHECK_UNROLL; ++k) {
            const bool earlier = first + k * CHECK_THREADS < row;
            const bool moves = from.at[k] != to.at[k];
            duplicate |= earlier && (moves || src != dst) && to.at[k] == dst;
            overwritten |= earlier && moves && to.at[k] == src;
        }
    }
    if (__syncthreads_or(duplicate)) {
        write_status(status, DUPLICATE_DESTINATION, row, dst);
        return;
    }
    write_status(status, OVERLAP, row, __syncthreads_or(overwritten) ? src : dst);
}

// Judges the list and writes the verdict. `first_outside` is the block's.
template <class Marks>
__device__ void check(const MoveList& list, const int* count, int capacity, const Marks& marks,
                      unsigned* first_outside, int* status) {
    // A short list is all latency: its rows travel together with its length, while marks are
    // cleared.
    const int length = count[0];
    Head head;
    head.load<0, CHECK_AHEAD>(list, static_cast<unsigned>(capacity));
    marks.clear();
    if (threadIdx.x == 0) {
        first_outside[0] = 0xffffffffu;
    }
    if (length < 0 || length > capacity) {
        write_status(status, BAD_COUNT, -1, length);
        return;
    }
    const unsigned rows = static_cast<unsigned>(length);
    head.load<CHECK_AHEAD, CHECK_UNROLL>(list, rows);
    const Verdict whole = judge(list, head, rows, marks);
    if (Marks::OUTLIVES_LAUNCH || whole.illegal) {
        marks.clear(list, head, rows);
    }
    if (!whole.illegal) {
        write_status(status, LEGAL, -1, 0);
        return;
    }

    // A front that reaches no further than the first row with a slot out of range is all slots.
    if (whole.outside < rows) {
        atomicMin(&first_outside[0], whole.outside);
    }
    __syncthreads();
    // What has an illegal front is illegal, so bisection finds the shortest such front.
    unsigned legal = 0;
    unsigned illegal = first_outside[0] < rows ? first_outside[0] + 1 : rows;
    while (illegal - legal > 1) {
        const unsigned middle = legal + (illegal - legal) / 2;
        (judge(list, head, middle, marks).illegal ? illegal : legal) = middle;
        marks.clear(list, head, middle);
    }
    report(list, head, illegal - 1, status);
}

// Moves UNROLL pieces of a lane, all loads in front of the stores: the misses of a lane overlap.
template <bool WHOLE>
__device__ void move_pieces(const char* source, char* destination, unsigned left) {
    uint4 batch[UNROLL];
#pragma unroll
    for (unsigned k = 0; k < UNROLL; ++k) {
        if (WHOLE || k * LANES < left) {
            batch[k] = load128_nc(source + k * LANES * PIECE);
        }
    }
#pragma unroll
    for (unsigned k = 0; k < UNROLL; ++k) {
        if (WHOLE || k * LANES < left) {
            store128(destination + k * LANES * PIECE, batch[k]);
        }
    }
}

// Copies one row by the LANES lanes that call it.
__device__ void move_row(const char* source, char* destination, unsigned pieces, unsigned lane) {
    for (unsigned piece = lane; piece < pieces; piece += UNROLL * LANES) {
        const unsigned left = pieces - piece;
        const unsigned long long at = static_cast<unsigned long long>(piece) * PIECE;
        if (left > (UNROLL - 1) * LANES) {
            move_pieces<true>(source + at, destination + at, left);
        } else {
            move_pieces<false>(source + at, destination + at, left);
        }
    }
}

// A group's way through all pairs (row, layer), the layer fastest, in steps of the whole grid. Two
// numbers, since there can be more pairs than 32 bits count.
struct Walk {
    unsigned row;
    unsigned layer;
    unsigned row_step;
    unsigned layer_step;
    unsigned layers;

    __device__ Walk(unsigned group, unsigned groups, unsigned extent)
        : row(group / extent),
          layer(group % extent),
          row_step(groups / extent),
          layer_step(groups % extent),
          layers(extent) {}

    __device__ void step() {
        row += row_step;
        layer += layer_step;
        if (layer >= layers) {
            layer -= layers;
            ++row;
        }
    }
};

// Where one row of one layer comes from and goes to.
struct Place {
    long long from;
    long long to;
    unsigned long long pool;
};

}  // namespace

// Judges one list and writes `status`. Must run, on the same stream, before each `relocate_rows`.
//
// Launch: one block of CHECK_THREADS threads, whatever the list's length. The marks, one bit a slot,
// are in dynamic shared memory where `bitmap` is None: 16 bytes for every 128 slots, and 16 more.
// Where a block cannot have as much, they are in `bitmap` and 16 bytes are enough; the bitmap
// belongs to the caller, is all zero before the launch and is left all zero also when the list is
// illegal, so that a captured step needs no memset. Two passes over the list where it is legal, of
// which the second reads sources only; a third one takes back what is marked in `bitmap`. A fault
// costs about log2(count) times as much. Lists and count are read only; the first slots of the dead
// tail may be loaded, as numbers.
//
// @kernel relocate_check
// @param src        read    int64  [capacity]                 source slots; a dead tail follows
// @param dst        read    int64  [capacity]                 destination slots, likewise
// @param count      read    int32  [1]                        rows of the list
// @param capacity   value   int32                             length of both lists
// @param num_slots  value   int64                             slots of every pool
// @param bitmap?    update  uint32 [ceil_div(num_slots, 32)]   zero again after; None: shared memory
// @param status     write   int32  [4]                        code, row, slot low word, high word
// @block CHECK_THREADS
// @shared 16 + 16 * ceil_div(num_slots, 128)
extern "C" __global__ void __launch_bounds__(CHECK_THREADS)
    relocate_check(const long long* __restrict__ src, const long long* __restrict__ dst,
                   const int* __restrict__ count, int capacity, long long num_slots,
                   unsigned int* bitmap, int* status) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, unsigned, first_outside, 1);
    const MoveList list = {src, dst, num_slots};
    if (bitmap != nullptr) {
        check(list, count, capacity, GlobalMarks{bitmap}, first_outside, status);
    } else {
        const unsigned words = static_cast<unsigned>((num_slots + 127) / 128) * 4;
        CARVE(cursor, unsigned, marks, words);
        check(list, count, capacity, SharedMarks{marks, words}, first_outside, status);
    }
}

// Moves the rows of a list that `relocate_check` found legal, in all layers, in one launch.
//
// Launch: any number of blocks of ROWS_THREADS threads; the grid need not know the list's length.
// No shared memory. Groups of 8 lanes move one row of one layer each, with 16-byte accesses, and
// stride over (row, layer) pairs. Slot s of layer l lies at layer_ptrs[l] + s * row_stride; the
// pools of two layers share no byte of a row; bytes between row_bytes and row_stride stay
// untouched. Where status[0] is not 0, or count[0] does not fit the list, nothing is written. The
// first slots of the dead tail may be loaded, as numbers; they are never used.
//
// @kernel relocate_rows
// @param layer_ptrs  read    uint64 [layers]     addresses of the layers' pools, multiples of 16
// @param layers      value   int32               layers, at least 1
// @param row_bytes   value   int64               bytes of a row, a multiple of 16
// @param row_stride  value   int64               bytes from slot to slot, a multiple of 16
// @param src         read    int64  [capacity]   source slots; a dead tail follows
// @param dst         read    int64  [capacity]   destination slots, likewise
// @param count       read    int32  [1]          rows of the list
// @param capacity    value   int32               length of src and dst
// @param status      read    int32  [4]          the verdict of relocate_check
// @reach layer_ptrs  update                      the pools, [slots, row_stride] bytes each
// @block ROWS_THREADS
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, ROWS_RESIDENT)
    relocate_rows(const unsigned long long* __restrict__ layer_ptrs, int layers,
                  long long row_bytes, long long row_stride, const long long* __restrict__ src,
                  const long long* __restrict__ dst, const int* __restrict__ count, int capacity,
                  const int* __restrict__ status) {
    constexpr unsigned GROUPS = ROWS_THREADS / LANES;
    const unsigned group = blockIdx.x * GROUPS + threadIdx.x / LANES;
    const unsigned groups = gridDim.x * GROUPS;
    const unsigned pieces = static_cast<unsigned>(row_bytes / PIECE);
    const unsigned lane = threadIdx.x % LANES;

    // Row by row, a row's layers side by side: that order does not depend on the list's length. A
    // short list is all latency, and its first places travel together with count and status.
    Walk walk(group, groups, static_cast<unsigned>(layers));
    Place place = {0, 0, 0};
    if (walk.row < static_cast<unsigned>(capacity)) {
        place = {src[walk.row], dst[walk.row], layer_ptrs[walk.layer]};
    }
    const int length = count[0];
    if (status[0] != LEGAL || length < 0 || length > capacity) {
        return;
    }
    const unsigned rows = static_cast<unsigned>(length);
    while (walk.row < rows) {
        if (place.from != place.to) {
            char* base = reinterpret_cast<char*>(place.pool);
            move_row(base + place.from * row_stride, base + place.to * row_stride, pieces, lane);
        }
        walk.step();
        if (walk.row < rows) {
            place = {src[walk.row], dst[walk.row], layer_ptrs[walk.layer]};
        }
    }
}
