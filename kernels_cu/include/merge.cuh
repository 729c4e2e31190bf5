// How the blocks of a kernel that merges partials divide their work: row tiles have different
// numbers of splits, which only the device knows, and the grid is fixed.
//
// A row tile is a number of units. 1, 2, 4, ... warps share a unit's splits: one for every LEAST of
// them, or for every 2, 4, ... LEAST until all turns find a block at once, or are no more than
// without sharing: the longest row tile keeps most. Where there are more turns than blocks even so,
// a warp does 2, 4, ... units of a few splits at once, as many as it has loads in flight for. A
// block does as many units of one row tile in a turn as its warps can.
//
// Every warp finds the turns of its block by itself: a lane reads what belongs to one row tile, all
// of it at once, and hands it on through registers. Nobody waits, and no load waits for another one
// but for the rows' bounds, which are needed last.
#pragma once

namespace merge {

constexpr unsigned ALL = 0xffffffffu;

// The exponent of a power of 2.
template <int POWER>
constexpr int log2_of = 1 + log2_of<POWER / 2>;
template <>
constexpr int log2_of<1> = 0;

// The least e with `value` <= `unit` x 2^e, up to LIMIT.
template <int LIMIT>
__device__ __forceinline__ int log_parts(int value, int unit) {
    int e = 0;
#pragma unroll
    for (int k = 0; k < LIMIT; ++k) {
        e += value > unit << k;
    }
    return e;
}

// What a block does at once, the same in all of its threads.
struct Turn {
    int begin;  // the row tile's partial slots
    int end;
    int log_sharers;  // 2^this many warps share a unit
    int log_units;    // or 2^this many units are a warp's
    int first_unit;
    int owner;  // the lane that knows the row tile

    __device__ __forceinline__ int sharers() const { return 1 << log_sharers; }
};

// The query rows of a row tile.
struct Rows {
    int first_token;  // of the request
    int first;        // of the request's rows
    int end;

    __device__ __forceinline__ bool has(int row_of_tile) const { return first + row_of_tile < end; }
};

// The turns of a block of THREADS threads. A warp does several units at once, as far as their
// splits are no more than IN_FLIGHT; 0: it does not. All lanes of all warps take part in every call.
template <int UNITS, int THREADS, int LEAST, typename QoIndex, int IN_FLIGHT = 0>
struct Turns {
    static constexpr int LOG_WARPS = log2_of<THREADS / 32>;  // at most 5
    // At most 2^this many units are a warp's: a row tile that was cut has two splits or more.
    static constexpr int MOST = IN_FLIGHT >= 16 ? 3 : IN_FLIGHT >= 8 ? 2 : IN_FLIGHT >= 4 ? 1 : 0;

    const int* indptr;  // bounds of the slots of each row tile that was cut; empty behind the last
    const int* cut;     // request and row tile of each
    const QoIndex* qo_indptr;
    int count;

    int first = 0;   // row tile of lane 0
    int before = 0;  // turns of earlier row tiles
    int busy;        // row tiles that the lanes have; less than a warp's: they are the last
    int number;      // of the turn
    int own_end;     // turns up to this lane's row tile
    int begin;       // of this lane's row tile, as are the following
    int end;
    int known;  // its number in the request x 16, and MOST more than the exponent of its sharers
    int first_token;
    int end_token;

    __device__ __forceinline__ Turns(const int* bounds, const int* cut_tiles, int tiles,
                                     const QoIndex* bounds_of_trees)
        : indptr(bounds),
          cut(cut_tiles),
          qo_indptr(bounds_of_trees),
          count(tiles),
          number(static_cast<int>(blockIdx.x)) {
        look();
    }

    // Turns of a row tile whose units 2^log_sharers warps share; below 0, of several units a warp.
    __device__ __forceinline__ static int turns_of(int log_sharers) {
        const int log_at_once = LOG_WARPS - log_sharers;
        return (UNITS + (1 << log_at_once) - 1) >> log_at_once;
    }

    // The exponent of the units of so many splits that a warp does at once: as many as there is
    // room for, but no more than it takes for as many turns as blocks. Where the lanes have not `all`
    // row tiles, room is taken to be the same for all, and the last one that fits is looked for.
    __device__ __forceinline__ int log_units(int splits, bool all) const {
        int room = 0;
#pragma unroll
        for (int k = 1; k <= MOST; ++k) {
            room += splits << k <= IN_FLIGHT;
        }
        const int blocks = static_cast<int>(gridDim.x);
        int needed = 0;
        if (!all) {
#pragma unroll
            for (int k = 0; k < MOST; ++k) {
                const int tile = blocks / turns_of(-k);
                needed += tile < 32 || (tile < count && indptr[tile] < indptr[tile + 1]);
            }
            return min(room, needed);
        }
        int tiles_of[MOST + 1];  // that have room for 2^k
#pragma unroll
        for (int k = 0; k <= MOST; ++k) {
            tiles_of[k] = __popc(__ballot_sync(ALL, splits > 0 && room == k));
        }
#pragma unroll
        for (int k = 0; k < MOST; ++k) {
            int turns = 0;
#pragma unroll
            for (int own = 0; own <= MOST; ++own) {
                turns += tiles_of[own] * turns_of(-min(own, k));
            }
            needed += turns > blocks;
        }
        return min(room, needed);
    }

    __device__ __forceinline__ void look() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int tile = first + lane;
        const bool inside = tile < count;
        begin = inside ? indptr[tile] : 0;
        end = inside ? indptr[tile + 1] : 0;
        const int request = inside ? cut[2 * tile] : -1;
        const int row_tile = inside ? cut[2 * tile + 1] : 0;
        first_token = request < 0 ? 0 : static_cast<int>(qo_indptr[request]);
        end_token = request < 0 ? 0 : static_cast<int>(qo_indptr[request + 1]);
        const int splits = end - begin;
        // Warps are left over only where these row tiles are all there are.
        busy = __popc(__ballot_sync(ALL, splits > 0));
        const bool few = first == 0 && (busy < 32 || count <= 32);
        const int wanted = log_parts<LOG_WARPS>(splits, LEAST);
        int tiles_of[LOG_WARPS + 1];  // that want 2^e warps a unit
#pragma unroll
        for (int e = 0; e <= LOG_WARPS; ++e) {
            tiles_of[e] = __popc(__ballot_sync(ALL, splits > 0 && wanted == e));
        }
        int without = 0;  // turns if nobody shares: as many are free
#pragma unroll
        for (int e = 0; e <= LOG_WARPS; ++e) {
            without += tiles_of[e] * turns_of(0);
        }
        const int free_turns = max(static_cast<int>(gridDim.x), without);
        int less = 0;  // what each has to do without, so that all turns find a block
#pragma unroll
        for (int k = 0; k < LOG_WARPS; ++k) {
            int turns = 0;
#pragma unroll
            for (int e = 0; e <= LOG_WARPS; ++e) {
                turns += tiles_of[e] * turns_of(e > k ? e - k : 0);
            }
            less += turns > free_turns;
        }
        int log_sharers = few ? max(wanted - less, 0) : 0;
        if (MOST > 0 && (!few || without > static_cast<int>(gridDim.x))) {
            log_sharers -= log_units(splits, few);
        }
        known = row_tile * 16 + log_sharers + MOST;
        own_end = splits == 0 ? 0 : turns_of(log_sharers);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int lower = __shfl_up_sync(ALL, own_end, distance);
            own_end += lane >= distance ? lower : 0;
        }
    }

    // Gives the next turn; false when there is none left.
    __device__ __forceinline__ bool next(Turn& turn) {
        int total = __shfl_sync(ALL, own_end, 31);
        while (number >= before + total) {
            before += total;
            first += 32;
            if (busy < 32 || first >= count) {
                return false;
            }
            look();
            total = __shfl_sync(ALL, own_end, 31);
        }
        const int within = number - before;
        turn.owner = __popc(__ballot_sync(ALL, own_end <= within));
        const int previous = __shfl_sync(ALL, own_end, max(turn.owner - 1, 0));
        turn.begin = __shfl_sync(ALL, begin, turn.owner);
        turn.end = __shfl_sync(ALL, end, turn.owner);
        const int log_sharers = __shfl_sync(ALL, known, turn.owner) % 16 - MOST;
        turn.log_sharers = max(log_sharers, 0);
        turn.log_units = max(-log_sharers, 0);
        turn.first_unit = (within - (turn.owner == 0 ? 0 : previous)) << (LOG_WARPS - log_sharers);
        number += static_cast<int>(gridDim.x);
        return true;
    }

    // The rows of the turn that was given last, of `heads` heads a token in row tiles of `size`.
    __device__ __forceinline__ Rows rows(const Turn& turn, int heads, int size) const {
        const int token = __shfl_sync(ALL, first_token, turn.owner);
        return {token, __shfl_sync(ALL, known, turn.owner) / 16 * size,
                (__shfl_sync(ALL, end_token, turn.owner) - token) * heads};
    }
};

}  // namespace merge
