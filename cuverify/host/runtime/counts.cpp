// What a launch asks of memory: 32-byte sectors of global requests, wavefronts of shared ones.
//
// The lanes of a warp do not run in lockstep here, so what one instruction of a warp does is put
// together afterwards: the n-th execution of a place by each lane, counted since all lanes of the warp
// last met (at a barrier, or at a collective that names them all) and since the lane last committed or
// waited for copies, is one request. Where lanes run a loop different numbers of times that is what
// hardware does, too, as long as those that leave it early do not come back before that.
//
// A copy of a struct that the compiler took to pieces (a float2 into two floats) is put together again:
// neighbouring accesses that a lane makes one after another, from one statement and column but different
// places in the code, are the one access of 8 or 16 bytes that its type asks for.
#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "state.h"

namespace cuverify_host {

bool counting;
std::vector<CountedSite> counted_sites;

namespace {

constexpr unsigned widest = 16;
constexpr unsigned max_warps = max_threads / warp_size;

// An access whose neighbours may follow.
struct Part {
    uintptr_t address;
    unsigned site, width;
    uint64_t pc;
};
struct OpenCopy {
    Part parts[widest];
    unsigned count, bytes;
    uintptr_t begin;
    uint32_t statement;  // 0: there is none
    Operation operation;
    bool shared;
};

// What the lanes of a warp did at one place since they last met, in order.
struct Step {
    uintptr_t address, destination;
    unsigned leg;
};
struct Series {
    std::vector<Step> of_lane[warp_size];
    bool used;
};
struct Warp {
    std::vector<Series> series;  // by site
    std::vector<unsigned> used;  // sites
};

using SiteKey = std::tuple<const char*, int, uint64_t, Operation, bool, unsigned>;
std::map<SiteKey, unsigned> numbers;
constexpr unsigned recent_places = 1024;
unsigned recent_sites[recent_places];    // the last one that was looked up for places of a kind
std::vector<uint32_t> site_statements;   // by site
std::vector<uint64_t> statement_starts;  // of code, and the statement that each belongs to
std::vector<uint32_t> statements;
OpenCopy open_copies[max_threads];
Warp counted_warps[max_warps];
unsigned legs[max_threads];  // of each thread's way since its warp met

uint32_t statement_of(const Place& place) {
    if (place.file) return 0;  // a wrapper's, which tells its width itself
    auto after = std::upper_bound(statement_starts.begin(), statement_starts.end(), place.pc);
    if (after == statement_starts.begin()) return 0;
    return statements[static_cast<size_t>(after - statement_starts.begin()) - 1];
}

bool is_site(const CountedSite& site, const Place& place, Operation operation, bool shared,
             unsigned width) {
    return site.place.pc == place.pc && site.place.line == place.line &&
           site.place.file == place.file && site.operation == operation && site.shared == shared &&
           site.width == width;
}

unsigned site_number(const Place& place, Operation operation, bool shared, unsigned width) {
    unsigned& guess = recent_sites[(place.pc + static_cast<unsigned>(place.line)) % recent_places];
    if (guess < counted_sites.size() &&
        is_site(counted_sites[guess], place, operation, shared, width))
        return guess;
    SiteKey key{place.file, place.line, place.pc, operation, shared, width};
    auto [found, fresh] = numbers.insert({key, static_cast<unsigned>(counted_sites.size())});
    if (fresh) {
        counted_sites.push_back({place, operation, shared, width, {}});
        site_statements.push_back(statement_of(place));
    }
    return guess = found->second;
}

void append(unsigned thread, unsigned site, uintptr_t address, uintptr_t destination = 0) {
    Warp& warp = counted_warps[thread / warp_size];
    if (warp.series.size() <= site) warp.series.resize(site + 1);
    Series& series = warp.series[site];
    if (!series.used) warp.used.push_back(site);
    series.used = true;
    series.of_lane[thread % warp_size].push_back({address, destination, legs[thread]});
}

void close_copy(unsigned thread) {
    OpenCopy& copy = open_copies[thread];
    bool whole =
        copy.count > 1 && (copy.bytes == 8 || copy.bytes == 16) && copy.begin % copy.bytes == 0;
    if (whole) {
        const Place& place = counted_sites[copy.parts[0].site].place;
        append(thread, site_number(place, copy.operation, copy.shared, copy.bytes), copy.begin);
    } else {
        for (unsigned i = 0; i < copy.count; ++i)
            append(thread, copy.parts[i].site, copy.parts[i].address);
    }
    copy.count = copy.bytes = 0;
}

bool continues(const OpenCopy& copy, const Part& part, uint32_t statement, Operation operation,
               bool shared) {
    if (!copy.count || !statement || statement != copy.statement || operation != copy.operation ||
        shared != copy.shared || copy.bytes + part.width > widest)
        return false;
    if (part.address != copy.begin + copy.bytes && part.address + part.width != copy.begin)
        return false;
    return std::none_of(copy.parts, copy.parts + copy.count,
                        [&](const Part& other) { return other.pc == part.pc; });
}

void count_part(const Place& place, uintptr_t address, unsigned width, Operation operation,
                bool shared) {
    Part part{address, site_number(place, operation, shared, width), width, place.pc};
    uint32_t statement = site_statements[part.site];
    OpenCopy& copy = open_copies[self->index];
    if (!continues(copy, part, statement, operation, shared)) {
        close_copy(self->index);
        copy.begin = address;
        copy.statement = statement;
        copy.operation = operation;
        copy.shared = shared;
    }
    copy.begin = std::min(copy.begin, address);
    copy.parts[copy.count++] = part;
    copy.bytes += width;
}

// The requests of a series: the n-th step of each lane in the same leg.
void tally_series(Series& series, CountedSite& site) {
    size_t next[warp_size] = {};
    for (;;) {
        unsigned leg = ~0u;
        for (unsigned lane = 0; lane < warp_size; ++lane)
            if (next[lane] < series.of_lane[lane].size())
                leg = std::min(leg, series.of_lane[lane][next[lane]].leg);
        if (leg == ~0u) break;
        Request request{site.operation, site.shared, site.width, {}, {}};
        for (unsigned lane = 0; lane < warp_size; ++lane) {
            const auto& steps = series.of_lane[lane];
            if (next[lane] == steps.size() || steps[next[lane]].leg != leg) continue;
            request.address[lane] = steps[next[lane]].address;
            request.destination[lane] = steps[next[lane]++].destination;
        }
        tally(request, site.counts);
    }
    for (auto& steps : series.of_lane) steps.clear();
}

}  // namespace

void count_access(uintptr_t address, size_t bytes, Operation operation, bool shared,
                  const Place& place) {
    // A block is copied by accesses as wide as its length and address allow.
    size_t width = std::min<size_t>(widest, bytes & (0 - bytes));
    while (address % width) width /= 2;
    for (size_t at = 0; at < bytes; at += width)
        count_part(place, address + at, static_cast<unsigned>(width), operation, shared);
}

void count_async(uintptr_t to, uintptr_t from, size_t bytes, Site site) {
    close_copy(self->index);
    Place place = place_of(site);
    auto width = static_cast<unsigned>(bytes);
    append(self->index, site_number(place, Operation::async_copy, false, width), from, to);
    append(self->index, site_number(place, Operation::async_copy, true, width), to);
}

void begin_leg() {
    close_copy(self->index);
    ++legs[self->index];
}

void lanes_meet(unsigned warp_number) {
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        close_copy(warp_number * warp_size + lane);
        legs[warp_number * warp_size + lane] = 0;
    }
    Warp& warp = counted_warps[warp_number];
    for (unsigned number : warp.used) {
        tally_series(warp.series[number], counted_sites[number]);
        warp.series[number].used = false;
    }
    warp.used.clear();
}

void all_lanes_meet() {
    for (unsigned warp = 0; warp * warp_size < block.threads; ++warp) lanes_meet(warp);
}

void start_counting(const uint64_t* starts, const uint32_t* numbers_of_statements, size_t count) {
    counting = true;
    numbers.clear();
    counted_sites.clear();
    site_statements.clear();
    statement_starts.assign(starts, starts + count);
    statements.assign(numbers_of_statements, numbers_of_statements + count);
    for (Warp& warp : counted_warps) warp = {};
    for (OpenCopy& copy : open_copies) copy.count = copy.bytes = 0;
}

}  // namespace cuverify_host
