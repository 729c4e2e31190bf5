// How the blocks of a kernel that merges partials divide their work: row tiles have different numbers
// of splits, which only the device knows, and the grid is fixed.
//
// A row tile is a number of units, a warp's work each if all of its splits can be in flight at once;
// else several warps share a unit. A block does warps / sharers units of one row tile in a turn. Every
// warp finds the turns of its block by itself: a lane looks at one row tile, and nobody waits.
#pragma once

namespace merge {

constexpr unsigned ALL = 0xffffffffu;

// How many warps share a unit: the least power of 2 that has all splits in flight, up to `warps`.
__device__ __forceinline__ int sharers(int splits, int warps, int in_flight) {
    int count = 1;
    while (count < warps && count * in_flight < splits) {
        count *= 2;
    }
    return count;
}

// What a block does at once, the same in all of its threads.
struct Turn {
    int tile;   // in the list of those that were cut
    int begin;  // its partial slots
    int end;
    int sharing;
    int first_unit;
};

// The turns of this block. All lanes of all warps take part in every call.
struct Turns {
    const int* indptr;  // bounds of the slots of each row tile that was cut; empty behind the last
    int count;
    int units;  // of a row tile
    int warps;
    int in_flight;

    int first = 0;   // row tile of lane 0
    int before = 0;  // turns of earlier row tiles
    int number;      // of the turn
    int own_end;     // turns up to this lane's row tile

    __device__ __forceinline__ Turns(const int* bounds, int tiles, int units_of_a_tile,
                                     int warps_of_a_block, int splits_in_flight)
        : indptr(bounds),
          count(tiles),
          units(units_of_a_tile),
          warps(warps_of_a_block),
          in_flight(splits_in_flight),
          number(static_cast<int>(blockIdx.x)) {
        look();
    }

    __device__ __forceinline__ void look() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int tile = first + lane;
        const int splits = tile < count ? indptr[tile + 1] - indptr[tile] : 0;
        const int at_once = warps / sharers(splits, warps, in_flight);
        own_end = splits == 0 ? 0 : (units + at_once - 1) / at_once;
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
            if (total == 0 || first >= count) {
                return false;
            }
            look();
            total = __shfl_sync(ALL, own_end, 31);
        }
        const int within = number - before;
        const int owner = __popc(__ballot_sync(ALL, own_end <= within));
        const int previous = __shfl_sync(ALL, own_end, max(owner - 1, 0));
        turn.tile = first + owner;
        turn.begin = indptr[turn.tile];
        turn.end = indptr[turn.tile + 1];
        turn.sharing = sharers(turn.end - turn.begin, warps, in_flight);
        turn.first_unit = (within - (owner == 0 ? 0 : previous)) * (warps / turn.sharing);
        number += static_cast<int>(gridDim.x);
        return true;
    }
};

}  // namespace merge
