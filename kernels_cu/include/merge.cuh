// How the blocks of a kernel that merges partials divide their work: row tiles have different
// numbers of splits, which only the device knows, and the grid is fixed.
//
// A row tile is a number of units; one with few query rows has an eighth, a quarter or half of them
// (GRAIN rows or more). 1, 2, 4, ... warps share a unit's splits: one for every LEAST of them,
// or for every 2, 4, ... LEAST until all turns find a block at once, or are no more than without
// sharing: the longest row tile keeps most. Where there are more turns than blocks even so, a warp
// does 2, 4, ... units of a few splits at once, as many as it has loads in flight for. A block does
// as many units of one row tile in a turn as its warps can.
//
// Every warp finds the turns of its block by itself: a lane reads what belongs to one row tile, all
// of it at once, and hands it on through registers. Nobody waits, and no load waits for another one.
// A block mostly begins when attention has ended, so that all instructions here count.
#pragma once

#include "vector.cuh"

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

// A row tile that was cut, as the plan says.
struct Cut {
    int begin;  // its partial slots; none behind the last row tile
    int end;
    int row_tile;
    int first_token;  // of the request
    int tokens;
};

// The turns of a block of THREADS threads, of row tiles of UNITS units and SIZE rows, TOKEN_ROWS rows
// a token; as many units count as GRAIN, 2 GRAIN, 4 GRAIN, ... rows have that hold all query rows. A warp
// does several units at once, as far as their splits are no more than IN_FLIGHT;
// 0: it does not. All lanes of all warps take part in every call.
template <int UNITS, int SIZE, int GRAIN, int TOKEN_ROWS, int THREADS, int LEAST, int IN_FLIGHT = 0>
struct Turns {
    static_assert(SIZE / GRAIN * GRAIN == SIZE && 1 << log2_of<SIZE / GRAIN> == SIZE / GRAIN,
                  "row tiles are halved");
    static constexpr int LOG_WARPS = log2_of<THREADS / 32>;  // at most 5
    // At most 2^this many units are a warp's: a row tile that was cut has two splits or more.
    static constexpr int MOST = IN_FLIGHT >= 16 ? 3 : IN_FLIGHT >= 8 ? 2 : IN_FLIGHT >= 4 ? 1 : 0;

    const int* indptr;  // bounds of the slots of each row tile that was cut; empty behind the last
    const int* tiles;   // request, row tile, first token and tokens of each
    int count;

    int first = 0;   // row tile of lane 0
    int before = 0;  // turns of earlier row tiles
    int busy;        // row tiles that the lanes have; less than a warp's: they are the last
    int number;      // of the turn
    int own_end;     // turns up to this lane's row tile, or to the last one
    Cut own;  // this lane's row tile; `row_tile` x 16, and MOST more than its sharers' exponent

    __device__ __forceinline__ Turns(const int* bounds, const int* cut_tiles, int most_tiles)
        : indptr(bounds),
          tiles(cut_tiles),
          count(most_tiles),
          number(static_cast<int>(blockIdx.x)) {
        look();
    }

    // The units of a row tile that count.
    __device__ __forceinline__ static int units_of(const Cut& tile) {
        constexpr int PARTS = log2_of<SIZE / GRAIN>;
        const int rows = tile.tokens * TOKEN_ROWS - tile.row_tile * SIZE;
        const int halved = PARTS - log_parts<PARTS>(rows, GRAIN);  // as often
        return tile.begin == tile.end ? 0 : (UNITS + (1 << halved) - 1) >> halved;
    }

    // Turns of so many units, each of 2^log_sharers warps; below 0, of several units a warp.
    __device__ __forceinline__ static int turns_of(int units, int log_sharers) {
        const int log_at_once = LOG_WARPS - log_sharers;
        return (units + (1 << log_at_once) - 1) >> log_at_once;
    }

    // The exponent of the units of so many splits that a warp does at once: as many as there is
    // room for, but no more than it takes for as many turns as blocks. Where the lanes have not
    // `all` row tiles, room is taken to be the same for all, row tiles are taken to be full, and
    // the last one that fits is looked for.
    __device__ __forceinline__ int log_units(int units, bool all) const {
        int room = 0;
#pragma unroll
        for (int k = 1; k <= MOST; ++k) {
            room += (own.end - own.begin) << k <= IN_FLIGHT && THREADS / 32 << k <= units;
        }
        const int blocks = static_cast<int>(gridDim.x);
        int needed = 0;
#pragma unroll
        for (int k = 0; k < MOST; ++k) {
            if (all) {
                needed += __reduce_add_sync(ALL, turns_of(units, -min(room, k))) > blocks;
            } else {
                const int tile = blocks / turns_of(UNITS, -k);
                needed += tile < 32 || (tile < count && indptr[tile] < indptr[tile + 1]);
            }
        }
        return min(room, needed);
    }

    __device__ __forceinline__ void look() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int tile = first + lane;
        own = {0, 0, 0, 0, 0};
        if (tile < count) {
            const uint4 words = load128(tiles + 4 * tile);
            own = {indptr[tile], indptr[tile + 1], static_cast<int>(words.y),
                   static_cast<int>(words.z), static_cast<int>(words.w)};
        }
        const int splits = own.end - own.begin;
        const int units = units_of(own);
        // Warps are left over only where these row tiles are all there are.
        busy = __popc(__ballot_sync(ALL, splits > 0));
        const bool few = first == 0 && (busy < 32 || count <= 32);
        int log_sharers = 0;
        if (few) {
            const int wanted = log_parts<LOG_WARPS>(splits, LEAST);
            const int blocks = static_cast<int>(gridDim.x);
            int without = turns_of(units, 0);  // if nobody shares
            int less = 0;     // what each has to do without, so that all turns find a block
            if (busy == 1) {  // the first lane's sums are its own
#pragma unroll
                for (int k = 0; k < LOG_WARPS; ++k) {
                    less += turns_of(units, max(wanted - k, 0)) > max(blocks, without);
                }
            } else {
                without = __reduce_add_sync(ALL, without);
#pragma unroll
                for (int k = 0; k < LOG_WARPS; ++k) {
                    const int turns = __reduce_add_sync(ALL, turns_of(units, max(wanted - k, 0)));
                    less += turns > max(blocks, without);  // as many are free
                }
            }
            log_sharers = max(wanted - less, 0);
            if (MOST > 0 && busy > 1 && without > blocks) {
                log_sharers -= log_units(units, true);
            }
        } else if (MOST > 0) {
            log_sharers -= log_units(units, false);
        }
        own.row_tile = own.row_tile * 16 + log_sharers + MOST;
        own_end = turns_of(units, log_sharers);
#pragma unroll 1
        for (int distance = 1; distance < busy; distance *= 2) {
            const int lower = __shfl_up_sync(ALL, own_end, distance);
            own_end += lane >= distance ? lower : 0;
        }
        const int last = __shfl_sync(ALL, own_end, max(busy - 1, 0));
        own_end = lane < busy ? own_end : last;  // no turn is theirs
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
        turn.begin = __shfl_sync(ALL, own.begin, turn.owner);
        turn.end = __shfl_sync(ALL, own.end, turn.owner);
        const int log_sharers = __shfl_sync(ALL, own.row_tile, turn.owner) % 16 - MOST;
        turn.log_sharers = max(log_sharers, 0);
        turn.log_units = max(-log_sharers, 0);
        turn.first_unit = (within - (turn.owner == 0 ? 0 : previous)) << (LOG_WARPS - log_sharers);
        number += static_cast<int>(gridDim.x);
        return true;
    }

    // The rows of the turn that was given last.
    __device__ __forceinline__ Rows rows(const Turn& turn) const {
        return {__shfl_sync(ALL, own.first_token, turn.owner),
                __shfl_sync(ALL, own.row_tile, turn.owner) / 16 * SIZE,
                __shfl_sync(ALL, own.tokens, turn.owner) * TOKEN_ROWS};
    }
};

}  // namespace merge
