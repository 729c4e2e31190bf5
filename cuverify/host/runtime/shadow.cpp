// The access checker: bounds, alignment, uninitialised and pending bytes, races.
//
// Every global buffer and shared array is a region with shadow cells that remember the last write, the
// last reads and whether the bytes hold anything. A cell stands for 16 bytes until some access is
// narrower or off that grid; then the cells of that stretch are split, so every cell is always covered
// by an access wholly and the answer is exact to the byte. Cells come into being when touched.
//
// Races are judged by happens-before, so one run finds every race on the paths it takes:
//   one block   a barrier orders everything; __syncwarp orders the lanes that took part (a small vector
//               clock per lane); nothing else does, shuffles and mma least of all
//   blocks      nothing is ordered, except through __threadfence + atomic on one side (release) and
//               atomic + __threadfence on the other (acquire) on the same word
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <sys/mman.h>
#include <tuple>
#include <unordered_map>

#include "state.h"

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

namespace cuverify_host {

bool checking;
static uint64_t access_limit, accesses_left;
void set_access_limit(uint64_t limit) { access_limit = limit; }

namespace {

constexpr unsigned chunk_shift = 12, chunk_bytes = 1u << chunk_shift, coarsest_shift = 4;
constexpr size_t device_alignment = 256;

enum Who : uint8_t { nobody, one_thread, one_warp, several_warps };

struct Stamp {          // who accessed a cell, and when
    uint32_t block1;    // block + 1; 0: never
    uint32_t interval;  // barriers that the block had passed
    uint32_t clock;     // the lane's count of __syncwarp
    uint32_t where;     // a program counter, or an index into `sites` with the top bit set
    uint16_t thread;
    uint8_t who;
    bool atomic;
    uint32_t fences;  // the thread's __threadfence calls before the access
};
enum Holds : uint8_t { as_region, written, pending };
struct alignas(64) Cell {  // one cache line: a checked launch is bound by how many it touches
    Stamp write, read;
    uint32_t read_lanes;
    uint32_t write_lanes;  // of a warp whose lanes changed it atomically, one after another
    Holds holds;
    bool read_elsewhere;  // `foreign_reads` has a read by another block than `read`'s
};
static_assert(sizeof(Cell) == 64, "of two lines, the second is missed too");

struct Chunk {
    Cell* cells;
    unsigned shift;  // bytes of a cell, as a power of two
};

struct Region {
    char* base;
    size_t bytes;
    size_t period, used;  // rows of `used` bytes every `period`; 0: dense
    const char* row;      // the one that was last looked for
    size_t device_shift;  // bytes by which the allocation misses what a device aligns it to
    Contents contents;
    bool writable, shared;
    std::string name;
    std::vector<Chunk> chunks;
};

// Cells live until their launch or block ends: taken in order from slabs of zeroed memory, the first
// of which is kept, since most blocks need no second one.
struct CellStore {
    static constexpr size_t slab_bytes = 8 << 20;
    std::vector<char*> slabs;
    size_t used = slab_bytes;
    bool first_is_fresh = true;

    Cell* take(size_t count) {
        size_t bytes = count * sizeof(Cell);
        if (used + bytes > slab_bytes) {
            void* slab = mmap(nullptr, slab_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (slab == MAP_FAILED) __builtin_trap();
            slabs.push_back(static_cast<char*>(slab));
            used = 0;
        }
        char* cells = slabs.back() + used;
        used += bytes;
        if (!first_is_fresh && slabs.size() == 1) memset(cells, 0, bytes);
        return reinterpret_cast<Cell*>(cells);
    }
    void clear() {
        if (slabs.empty()) return;
        for (size_t i = 1; i < slabs.size(); ++i) munmap(slabs[i], slab_bytes);
        slabs.resize(1);
        used = 0;
        first_is_fresh = false;
    }
};

struct Release {  // what a block had made visible when one of its threads touched an atomic
    uint32_t interval_fenced;  // accesses in earlier intervals are covered
    uint32_t interval;         // when it happened
    uint16_t thread;
    uint32_t thread_fences;
    std::shared_ptr<const std::vector<uint32_t>> fences_at_barrier;  // per thread
};
using Releases = std::unordered_map<uint32_t, Release>;  // by block1

// Of two releases of a block that were both met, the one that covers more: an atomic without a fence,
// on whatever word, takes back nothing of what an earlier one has released. How many fences a thread
// has passed says nothing beside another thread's number: of two with a fence it is the later one.
void add_release(Releases& into, uint32_t block1, const Release& release) {
    auto [known, fresh] = into.emplace(block1, release);
    if (fresh) return;
    const Release& old = known->second;
    if (std::make_tuple(release.interval_fenced, release.interval, release.thread_fences != 0) >=
        std::make_tuple(old.interval_fenced, old.interval, old.thread_fences != 0))
        known->second = release;
}

struct ThreadClock {
    uint32_t clock;
    uint32_t known[warp_size];  // accesses of lane l with a smaller clock come before
    uint32_t fences;
    uint32_t interval_at_fence;
    Releases acquired, seen;  // `seen` becomes `acquired` at the next fence
};

std::vector<std::unique_ptr<Region>> regions;  // by base address
// The region that was found last for addresses of a kind: kernels go to and fro between a few.
constexpr unsigned recent_regions = 64;
Region* recent[recent_regions];
void forget_recent() { std::fill(std::begin(recent), std::end(recent), nullptr); }
CellStore cells_of_launch, cells_of_block;
std::unordered_map<const Cell*, Stamp> foreign_reads;  // kept, since they order differently
ThreadClock clocks[max_threads];
std::vector<Site> sites;
std::unordered_map<uintptr_t, Releases> released;  // by 8-byte word
Releases block_acquired, block_seen;
std::shared_ptr<const std::vector<uint32_t>> fences_at_barrier;
bool any_fence;

uint32_t pack(const Place& place) {
    if (!place.file) return static_cast<uint32_t>(place.pc);
    for (size_t i = 0; i < sites.size(); ++i)
        if (sites[i].line == place.line && sites[i].file == place.file)
            return 0x80000000u | static_cast<uint32_t>(i);
    sites.push_back({place.file, place.line});
    return 0x80000000u | static_cast<uint32_t>(sites.size() - 1);
}

Place unpack(uint32_t where) {
    if (where & 0x80000000u) return place_of(sites[where & 0x7fffffffu]);
    return {nullptr, 0, where};
}

Region* find_region(const char* address) {
    Region*& guess = recent[(reinterpret_cast<uintptr_t>(address) >> 8) % recent_regions];
    if (guess && address >= guess->base && address < guess->base + guess->bytes) return guess;
    auto after =
        std::upper_bound(regions.begin(), regions.end(), address,
                         [](const char* a, const auto& region) { return a < region->base; });
    if (after == regions.begin()) return nullptr;
    Region* region = std::prev(after)->get();
    if (address >= region->base + region->bytes) return nullptr;
    return guess = region;
}

// The region that an address outside all of them most probably meant: the nearest one.
Region* nearest_region(const char* address) {
    Region* best = nullptr;
    size_t best_distance = SIZE_MAX;
    for (const auto& region : regions) {
        size_t distance = address < region->base
                              ? static_cast<size_t>(region->base - address)
                              : static_cast<size_t>(address - (region->base + region->bytes));
        if (distance < best_distance) best_distance = distance, best = region.get();
    }
    return best;
}

Fault memory_fault(const char* kind, std::string message, const Place& place, const Region* region,
                   const char* address, size_t bytes) {
    Fault fault{kind, std::move(message), here(place)};
    fault.bytes = static_cast<uint32_t>(bytes);
    if (region)
        fault.region = {region->name, region->shared, region->bytes, address - region->base};
    return fault;
}

bool covered(const Releases& releases, const Stamp& stamp) {
    auto found = releases.find(stamp.block1);
    if (found == releases.end()) return false;
    const Release& release = found->second;
    if (stamp.interval < release.interval_fenced) return true;
    if (stamp.thread == release.thread && stamp.who == one_thread)
        return stamp.fences < release.thread_fences;
    if (stamp.who != one_thread || stamp.interval >= release.interval) return false;
    return release.fences_at_barrier && stamp.fences < (*release.fences_at_barrier)[stamp.thread];
}

__attribute__((noinline)) bool ordered_within_warp_or_by_fences(const Stamp& stamp, uint32_t lanes,
                                                                bool shared) {
    const ThreadClock& clock = clocks[self->index];
    if (stamp.block1 != block.linear + 1)
        return shared || covered(clock.acquired, stamp) || covered(block_acquired, stamp);
    if (stamp.interval != block.interval) return true;
    if (stamp.who == several_warps) return false;
    if (stamp.thread / warp_size != self->warp) return false;
    if (stamp.who == one_thread)
        return stamp.thread == self->index || stamp.clock < clock.known[stamp.thread % warp_size];
    for (unsigned lane = 0; lane < warp_size; ++lane)
        if ((lanes >> lane & 1) && lane != self->lane && stamp.clock >= clock.known[lane])
            return false;
    return true;
}

inline bool happens_before(const Stamp& stamp, uint32_t lanes, bool shared) {
    if (stamp.block1 == block.linear + 1) {
        if (stamp.interval != block.interval) return true;
        if (stamp.who == one_thread && stamp.thread == self->index) return true;
    }
    return ordered_within_warp_or_by_fences(stamp, lanes, shared);
}

Stamp stamp_now(uint32_t where, bool atomic) {
    const ThreadClock& clock = clocks[self->index];
    return {
        block.linear + 1, block.interval, clock.clock, where, static_cast<uint16_t>(self->index),
        one_thread,       atomic,         clock.fences};
}

void note_read(Cell& cell, const Stamp& now, bool shared) {
    Stamp& last = cell.read;
    if (!last.block1 || last.atomic != now.atomic ||
        happens_before(last, cell.read_lanes, shared)) {
        last = now;
        cell.read_lanes = 1u << self->lane;
        return;
    }
    if (last.block1 != now.block1) {
        foreign_reads[&cell] = last;
        cell.read_elsewhere = true;
        last = now;
        cell.read_lanes = 1u << self->lane;
        return;
    }
    cell.read_lanes |= 1u << self->lane;
    last.who = last.thread / warp_size == self->warp && last.who != several_warps ? one_warp
                                                                                  : several_warps;
}

// The write becomes the cell's last one. Atomics that nothing orders are remembered together: each of
// them races with a plain access, not only the last.
void note_write(Cell& cell, const Stamp& now, bool shared) {
    Stamp& last = cell.write;
    bool joins = now.atomic && last.atomic && last.block1 == now.block1 &&
                 !happens_before(last, cell.write_lanes, shared);
    if (!joins) {
        last = now;
        cell.write_lanes = 1u << self->lane;
        return;
    }
    cell.write_lanes |= 1u << self->lane;
    last.who = last.thread / warp_size == self->warp && last.who != several_warps ? one_warp
                                                                                  : several_warps;
}

void split(Region& region, size_t index, unsigned shift) {
    Chunk& chunk = region.chunks[index];
    CellStore& store = region.shared ? cells_of_block : cells_of_launch;
    size_t count = chunk_bytes >> shift;
    Cell* cells = store.take(count);
    if (chunk.cells) {
        unsigned factor = chunk.shift - shift;
        for (size_t i = 0; i < count; ++i) {
            const Cell& from = chunk.cells[i >> factor];
            cells[i] = from;
            if (from.read_elsewhere) foreign_reads[&cells[i]] = foreign_reads[&from];
        }
    }
    chunk = {cells, shift};
}

// Calls `visit(cell, address)` for each cell under the access; stops when it returns false.
template <class Visit>
void for_cells(Region& region, const char* address, size_t bytes, Visit visit) {
    // Chunks lie on a grid of absolute addresses, so that a cell's alignment is its data's.
    auto origin = reinterpret_cast<uintptr_t>(region.base) & ~uintptr_t{chunk_bytes - 1};
    auto at = reinterpret_cast<uintptr_t>(address);
    auto end = at + bytes;
    while (at < end) {
        size_t index = (at - origin) >> chunk_shift;
        auto chunk_end = origin + ((index + 1) << chunk_shift);
        auto stop_at = std::min<uintptr_t>(end, chunk_end);
        unsigned shift =
            static_cast<unsigned>(__builtin_ctzll((at | stop_at) | (1u << coarsest_shift)));
        if (!region.chunks[index].cells || shift < region.chunks[index].shift)
            split(region, index, std::min(shift, coarsest_shift));
        Chunk& chunk = region.chunks[index];
        for (; at < stop_at; at += size_t{1} << chunk.shift) {
            Cell& cell = chunk.cells[(at & (chunk_bytes - 1)) >> chunk.shift];
            if (!visit(cell, reinterpret_cast<const char*>(at))) return;
        }
    }
}

// Whether an access to a strided tensor stays within one row.
inline bool within_row(Region& region, const char* address, size_t bytes) {
    if (!region.period || static_cast<size_t>(address - region.row) + bytes <= region.used)
        return true;
    size_t at = static_cast<size_t>(address - region.base) % region.period;
    region.row = address - at;
    return at + bytes <= region.used;
}

inline bool aligned(const char* address, size_t bytes) {
    bool power_of_two = !(bytes & (bytes - 1));
    return !power_of_two || bytes > 16 || !(reinterpret_cast<uintptr_t>(address) & (bytes - 1));
}

// The rest of a judgement is rare. It is kept out of line: strings would make every thread's frame
// large, and a block of threads has as many frames.
struct Access {
    Region& region;
    const char* address;  // of the cell
    size_t bytes;
    bool write;
    const Place& place;
};

__attribute__((noinline, cold)) void report_contents(const Access& access, Cell& cell) {
    bool in_flight = cell.holds == pending;
    std::string text = in_flight ? std::string(access.write ? "write to" : "read of") +
                                       " bytes that a cp.async has not been waited for"
                                 : "read of bytes that nothing has written";
    Fault found = memory_fault(in_flight ? "pending-cp-async" : "uninitialised-read", text,
                               access.place, &access.region, access.address, access.bytes);
    if (in_flight)
        found.other = {cell.write.block1 - 1, cell.write.thread, unpack(cell.write.where)};
    record(std::move(found));
    cell.holds = written;
}

__attribute__((noinline, cold)) void report_race(const Access& access, Cell& cell,
                                                 const Stamp& with, bool after_write) {
    std::string text = !after_write   ? "write after read"
                       : access.write ? "write after write"
                                      : "read after write";
    text += with.block1 != block.linear + 1 ? " by another block, which nothing orders"
                                            : " without a barrier between";
    Fault found = memory_fault("race", std::move(text), access.place, &access.region,
                               access.address, access.bytes);
    found.other = {with.block1 - 1, with.thread, unpack(with.where)};
    record(std::move(found));
    cell.write = cell.read = Stamp{};
    cell.read_elsewhere = false;
}

// End the launch for the rule that an access breaks.
[[noreturn]] __attribute__((noinline, cold)) void refuse(Region* region, const char* address,
                                                         size_t bytes, bool write,
                                                         const Place& place) {
    std::string verb = write ? "write" : "read";
    std::string width = " of " + std::to_string(bytes) + " bytes";
    if (!region) {
        region = nearest_region(address);
        stop(memory_fault("out-of-bounds", verb + (region ? width : "") + " outside every buffer",
                          place, region, address, bytes));
    }
    if (address + bytes > region->base + region->bytes)
        stop(memory_fault("out-of-bounds", verb + width + " runs over the end of the buffer", place,
                          region, address, bytes));
    if (!within_row(*region, address, bytes))
        stop(memory_fault("out-of-bounds", verb + " between the rows of a strided tensor", place,
                          region, address, bytes));
    if (write && !region->writable)
        stop(memory_fault("write-to-read-only", "the contract declares this argument `read`", place,
                          region, address, bytes));
    stop(memory_fault("misaligned",
                      std::to_string(bytes) + "-byte access at an address that is " +
                          std::to_string(reinterpret_cast<uintptr_t>(address) % bytes) +
                          " bytes off a multiple of " + std::to_string(bytes),
                      place, region, address, bytes));
}

[[noreturn]] __attribute__((noinline, cold)) void refuse_more(const char* address, size_t bytes,
                                                              const Place& place) {
    stop(memory_fault("endless-loop",
                      "the launch has made " + std::to_string(access_limit) +
                          " memory accesses: it waits for something that never comes",
                      place, nullptr, address, bytes));
}

void judge(Region& region, const char* address, size_t bytes, unsigned access, const Place& place) {
    bool write = access & access_write, atomic = access & access_atomic, shared = region.shared;
    bool blank = (!write || atomic) && region.contents == Contents::uninitialised;
    Stamp now = stamp_now(pack(place), atomic);
    for_cells(region, address, bytes, [&](Cell& cell, const char* at) {
        if (cell.holds == pending ? cell.write.block1 != 0 : cell.holds == as_region && blank)
            report_contents({region, at, bytes, write, place}, cell);
        if (cell.write.block1 && !(atomic && cell.write.atomic) &&
            !happens_before(cell.write, cell.write_lanes, shared)) {
            report_race({region, at, bytes, write, place}, cell, Stamp(cell.write), true);
        } else if (write && cell.read.block1) {
            if (!(atomic && cell.read.atomic) &&
                !happens_before(cell.read, cell.read_lanes, shared)) {
                report_race({region, at, bytes, write, place}, cell, Stamp(cell.read), false);
            } else if (cell.read_elsewhere) {
                Stamp other = foreign_reads[&cell];
                if (!(atomic && other.atomic) && !happens_before(other, 0, shared))
                    report_race({region, at, bytes, write, place}, cell, other, false);
            }
        }
        if (write) {
            note_write(cell, now, shared);
            cell.holds = written;
        } else {
            note_read(cell, now, shared);
        }
        return true;
    });
}

void note_atomic(const char* address) {
    ThreadClock& clock = clocks[self->index];
    Releases& word = released[reinterpret_cast<uintptr_t>(address) >> 3];
    // Acquire side: what others released here counts after this thread's next fence.
    for (const auto& [block1, release] : word)
        if (block1 != block.linear + 1) add_release(clock.seen, block1, release);
    if (!any_fence) return;
    Release mine{clock.fences ? clock.interval_at_fence : 0, block.interval,
                 static_cast<uint16_t>(self->index), clock.fences, fences_at_barrier};
    add_release(word, block.linear + 1, mine);
    // What other threads of the block have acquired is passed on by those that fenced behind it.
    for (const auto& [block1, release] : clock.acquired) add_release(word, block1, release);
}

void merge(Releases& into, const Releases& from) {
    for (const auto& [block1, release] : from) add_release(into, block1, release);
}

}  // namespace

void add_region(void* base, const void* allocation, size_t bytes, size_t period, size_t used,
                Contents contents, bool writable, bool shared, const char* name) {
    auto region = std::make_unique<Region>();
    region->base = static_cast<char*>(base);
    region->row = region->base;
    region->bytes = bytes;
    region->period = period;
    region->used = used;
    region->device_shift = reinterpret_cast<uintptr_t>(allocation) % device_alignment;
    region->contents = contents;
    region->writable = writable;
    region->shared = shared;
    region->name = name;
    auto first = reinterpret_cast<uintptr_t>(base) >> chunk_shift;
    auto last = (reinterpret_cast<uintptr_t>(base) + bytes) >> chunk_shift;
    region->chunks.resize(last - first + 1);
    auto at = std::upper_bound(regions.begin(), regions.end(), region->base,
                               [](const char* a, const auto& other) { return a < other->base; });
    regions.insert(at, std::move(region));
    forget_recent();
}

uintptr_t as_on_a_device(const void* address) {
    const Region* region = find_region(static_cast<const char*>(address));
    return reinterpret_cast<uintptr_t>(address) - (region ? region->device_shift : 0);
}

std::optional<RegionPart> region_part(const void* pointer) {
    auto address = static_cast<const char*>(pointer);
    const Region* region = find_region(address);
    if (!region) region = nearest_region(address);
    if (!region) return {};
    return RegionPart{region->name, region->shared, region->bytes, address - region->base};
}

void forget_all_regions() {
    regions.clear();
    forget_recent();
    cells_of_launch.clear();
    cells_of_block.clear();
    foreign_reads.clear();
}

void forget_shared_regions() {
    regions.erase(std::remove_if(regions.begin(), regions.end(),
                                 [](const auto& region) { return region->shared; }),
                  regions.end());
    forget_recent();
    cells_of_block.clear();
}

static Operation operation_of(unsigned access) {
    if (access & access_atomic) return Operation::atomic;
    if (access & access_matrix) return Operation::matrix_load;
    return access & access_write ? Operation::store : Operation::load;
}

__attribute__((noinline)) static void check_memory(const char* address, size_t bytes,
                                                   unsigned access, const Place& place) {
    if (address >= __ehdr_start && address < _end) return;  // constants of the kernel's own library
    maybe_preempt();
    if (accesses_left-- == 0) refuse_more(address, bytes, place);
    bool write = access & access_write;
    Region* region = find_region(address);
    if (!region || address + bytes > region->base + region->bytes ||
        !within_row(*region, address, bytes) || (write && !region->writable) ||
        !aligned(address, bytes))
        refuse(region, address, bytes, write, place);
    judge(*region, address, bytes, access, place);
    if (access & access_atomic) note_atomic(address);
    if (counting && !(access & access_uncounted))
        count_access(as_on_a_device(address), bytes, operation_of(access), region->shared, place);
}

// Most accesses are to a thread's own stack and end here.
void check_access(const void* pointer, size_t bytes, unsigned access, const Place& place) {
    if (!checking || !self || on_a_fiber_stack(pointer)) return;
    check_memory(static_cast<const char*>(pointer), bytes, access, place);
}

void misaligned_access(const void* pointer, size_t alignment, Place place) {
    auto address = static_cast<const char*>(pointer);
    if (!checking || !self || on_a_fiber_stack(pointer)) return;
    Region* region = find_region(address);
    stop(memory_fault("misaligned",
                      "an access that wants a multiple of " + std::to_string(alignment) +
                          " bytes meets an address " +
                          std::to_string(reinterpret_cast<uintptr_t>(address) % alignment) +
                          " bytes off",
                      place, region, address, alignment));
}

void mark_pending(void* destination, size_t bytes) {
    Region* region = find_region(static_cast<char*>(destination));
    if (!region) return;
    for_cells(*region, static_cast<char*>(destination), bytes, [](Cell& cell, const char*) {
        cell.holds = pending;
        return true;
    });
}

void mark_written(void* destination, size_t bytes) {
    Region* region = find_region(static_cast<char*>(destination));
    if (!region) return;
    for_cells(*region, static_cast<char*>(destination), bytes, [](Cell& cell, const char*) {
        cell.holds = written;
        return true;
    });
}

void checker_start_launch() {
    accesses_left = access_limit;
    sites.clear();
    released.clear();
    any_fence = false;
}

void checker_start_block() {
    for (unsigned i = 0; i < block.threads; ++i) {
        ThreadClock& clock = clocks[i];
        clock.clock = clock.fences = clock.interval_at_fence = 0;
        memset(clock.known, 0, sizeof clock.known);
        clock.acquired.clear();
        clock.seen.clear();
    }
    block_acquired.clear();
    block_seen.clear();
    fences_at_barrier.reset();
}

void checker_barrier() {
    if (!any_fence) return;
    auto fences = std::make_shared<std::vector<uint32_t>>(block.threads);
    for (unsigned i = 0; i < block.threads; ++i) {
        (*fences)[i] = clocks[i].fences;
        merge(block_acquired, clocks[i].acquired);
        merge(block_seen, clocks[i].seen);
    }
    fences_at_barrier = std::move(fences);
}

void checker_sync_warp(unsigned warp, unsigned lanes) {
    unsigned base = warp * warp_size;
    uint32_t known[warp_size] = {};
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        ThreadClock& clock = clocks[base + lane];
        for (unsigned l = 0; l < warp_size; ++l) known[l] = std::max(known[l], clock.known[l]);
        known[lane] = std::max(known[lane], ++clock.clock);
    }
    for (unsigned lane = 0; lane < warp_size; ++lane)
        if (lanes >> lane & 1) memcpy(clocks[base + lane].known, known, sizeof known);
}

void checker_end_launch() {
    cells_of_launch.clear();
    foreign_reads.clear();
}

void thread_fence() {
    if (!checking || !self) return;
    any_fence = true;
    ThreadClock& clock = clocks[self->index];
    ++clock.fences;
    clock.interval_at_fence = block.interval;
    merge(clock.acquired, clock.seen);
    merge(clock.acquired, block_seen);
    merge(clock.acquired, block_acquired);
}

}  // namespace cuverify_host
