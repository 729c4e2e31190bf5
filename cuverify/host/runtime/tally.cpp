// What the hardware makes of one request: sectors of global memory, passes through shared memory.
//
// The rules for copies, for atomics and for wide loads are those that an H200's counters follow; see
// docs/decisions/0022-counts-of-memory-requests.md.
#include <algorithm>

#include "state.h"

namespace cuverify_host {

namespace {

constexpr unsigned banks = 32, bank_bytes = 4, sector_bytes = 32, line_bytes = 128;
constexpr unsigned widest_access = 16, most_words = warp_size * widest_access / bank_bytes;

// Distinct values among the first `count`, which it sorts.
template <class T>
unsigned distinct(T* values, unsigned count) {
    std::sort(values, values + count);
    return static_cast<unsigned>(std::unique(values, values + count) - values);
}

// Lanes that add to one word are served one after another, and each turn looks up its sectors anew.
unsigned sectors_of_atomics(const uintptr_t* active, unsigned count) {
    using TurnAndSector = std::pair<unsigned, uintptr_t>;
    TurnAndSector found[warp_size];
    for (unsigned i = 0; i < count; ++i) {
        auto turn = static_cast<unsigned>(std::count(active, active + i, active[i]));
        found[i] = {turn, active[i] / sector_bytes};
    }
    return distinct(found, count);
}

// A cp.async looks up, for each line that it reads, the sectors that it writes.
unsigned sectors_of_copy(const Request& request) {
    using LineAndSector = std::pair<uintptr_t, uintptr_t>;
    LineAndSector found[warp_size];
    unsigned count = 0;
    for (unsigned lane = 0; lane < warp_size; ++lane)
        if (request.address[lane] != no_access)
            found[count++] = {request.address[lane] / line_bytes,
                              request.destination[lane] / sector_bytes};
    return distinct(found, count);
}

// How many words the busiest bank gives or takes. Lanes that want the same word are served at once,
// atomics one after another.
unsigned busiest_bank(const uintptr_t* active, unsigned count, unsigned width, bool atomic) {
    uintptr_t words[most_words];
    unsigned used = 0, of_bank[banks] = {};
    for (unsigned i = 0; i < count; ++i)
        for (unsigned byte = 0; byte < width; byte += bank_bytes)
            words[used++] = (active[i] + byte) / bank_bytes;
    if (!atomic) used = distinct(words, used);
    for (unsigned i = 0; i < used; ++i) ++of_bank[words[i] % banks];
    return *std::max_element(of_bank, of_bank + banks);
}

// Whether each of some lanes wants what its neighbour at `distance` wants, where both take part.
bool in_pairs(const uintptr_t* addresses, unsigned lanes, unsigned distance) {
    for (unsigned lane = 0; lane < lanes; ++lane) {
        uintptr_t one = addresses[lane], other = addresses[lane ^ distance];
        if (one != no_access && other != no_access && one != other) return false;
    }
    return true;
}

// One pass over some lanes, as often as their busiest bank wants it.
void pass_over(const Request& request, unsigned first, unsigned lanes, Counts& counts) {
    uintptr_t active[warp_size];
    unsigned count = 0;
    for (unsigned lane = first; lane < first + lanes; ++lane)
        if (request.address[lane] != no_access) active[count++] = request.address[lane];
    if (!count) return;
    bool atomic = request.operation == Operation::atomic;
    // What a cp.async copies arrives sector by sector and meets no conflicts.
    bool copy = request.operation == Operation::async_copy;
    counts.wavefronts += copy ? 1 : busiest_bank(active, count, request.width, atomic);
    ++counts.ideal_wavefronts;
}

// 32 banks of 4 bytes are 128 bytes: a half warp of 8 bytes a lane, or a quarter of 16. Two of those
// are one where a load wants everything in pairs.
void tally_shared(const Request& request, Counts& counts) {
    unsigned lanes = warp_size * bank_bytes / std::max(request.width, bank_bytes);
    bool wide_load = request.operation == Operation::load && request.width > bank_bytes;
    unsigned step = wide_load ? 2 * lanes : lanes;
    for (unsigned first = 0; first < warp_size; first += step) {
        const uintptr_t* addresses = request.address + first;
        bool paired = in_pairs(addresses, step, 1) || in_pairs(addresses, step, 2);
        unsigned at_once = paired ? step : lanes;
        for (unsigned lane = first; lane < first + step; lane += at_once)
            pass_over(request, lane, at_once, counts);
    }
}

unsigned sectors(const Request& request, const uintptr_t* active, unsigned count) {
    if (request.operation == Operation::atomic) return sectors_of_atomics(active, count);
    if (request.operation == Operation::async_copy) return sectors_of_copy(request);
    uintptr_t found[warp_size];
    for (unsigned i = 0; i < count; ++i) found[i] = active[i] / sector_bytes;
    return distinct(found, count);
}

void tally_global(const Request& request, uintptr_t* active, unsigned count, Counts& counts) {
    counts.sectors += sectors(request, active, count);
    unsigned bytes = distinct(active, count) * request.width;
    counts.ideal_sectors += (bytes + sector_bytes - 1) / sector_bytes;
}

}  // namespace

void tally(const Request& request, Counts& counts) {
    uintptr_t active[warp_size];
    unsigned count = 0;
    for (uintptr_t address : request.address)
        if (address != no_access) active[count++] = address;
    if (!count) return;
    ++counts.requests;
    counts.bytes += count * request.width;
    if (request.shared)
        tally_shared(request, counts);
    else
        tally_global(request, active, count, counts);
}

}  // namespace cuverify_host
