// The state that the runtime's parts share: fibers, the block in flight, faults.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../include/cuverify_host_runtime.h"
#include "fiber.h"

namespace cuverify_host {

constexpr unsigned max_threads = 1024;
constexpr unsigned warp_size = 32;

enum class State : unsigned char { ready, at_barrier, at_collective, done };
enum class Schedule : unsigned { ascending, descending, random };

struct AsyncCopy {
    void* destination;
    const void* source;
    int bytes, source_bytes;
    Site site;
};

// The first two cache lines hold all that a barrier touches.
struct alignas(64) Fiber : Thread {
    Context context;
    State state;
    Collective waiting_for;
    unsigned index;  // linear thread index in the block
    Site site;       // where it waits
    unsigned mask;
    void* slot;
    std::vector<std::vector<AsyncCopy>> async_groups;
    std::vector<AsyncCopy> async_open;
    void* kept;  // the address sanitizer's, while the fiber does not run
};

struct Block {
    unsigned linear;      // linear block index
    unsigned threads;     // threads of a block
    unsigned live;        // those that have not returned
    unsigned at_barrier;  // those that wait at a block barrier
    uint32_t interval;    // barriers passed
};

extern Fiber fibers[max_threads];
extern Fiber* self;  // the running fiber; null while the scheduler itself runs
extern Block block;

// ---- faults (faults.cpp) ----------------------------------------------------------------------
struct Place {  // a place in the kernel: a Site, or the address after an instrumented access
    const char* file;
    int line;
    uint64_t pc;  // relative to the library's start; 0 where file and line are known
};
struct Actor {
    uint32_t block, thread;
    Place place;
};
struct
    RegionPart {  // a byte of an argument or a shared array, kept by name: shared arrays come and go
    std::string name;
    bool shared;
    size_t bytes;
    int64_t offset;
};
struct Fault {
    std::string kind, message;
    Actor actor;
    std::optional<Actor> other = {};
    std::optional<RegionPart> region = {};
    uint32_t bytes = 0;  // width of the access, 0 where none is concerned
};
extern std::vector<Fault> faults;
// A fault as Python reads it.
struct PlaceView {
    char file[256];
    int32_t line;
    uint64_t pc;
    uint32_t block, thread;
};
struct FaultView {
    char kind[32];
    char message[512];
    PlaceView actor, other;
    int32_t has_other, has_region, region_shared;
    char region[64];
    uint64_t region_bytes;
    int64_t offset;
    uint32_t bytes;
};
void clear_faults();
bool faulted();
Actor here(Place place);
Place place_of(Site site);
// Record a fault and go on; the same kind at the same pair of places is recorded once.
void record(Fault fault);
// The argument or shared array that holds an address, or the nearest one, and the byte in it.
std::optional<RegionPart> region_part(const void* address);
// Record a fault and end the launch.
[[noreturn]] void stop(Fault fault);

// ---- scheduler (scheduler.cpp) ------------------------------------------------------------------
// Use `given` as the fibers' stacks, or make them; null where that fails. Each library has a runtime of
// its own, but one process needs one set of stacks: their guard pages would use up its mappings.
void* use_stacks(void* given);
void set_schedule(unsigned kind, uint64_t seed);
[[noreturn]] void leave_launch();
void maybe_preempt();  // random schedule: another thread may run before this access
bool on_a_fiber_stack(const void* address);

// ---- checker (shadow.cpp) -----------------------------------------------------------------------
enum Access : unsigned {
    access_read = 0,
    access_write = 1,
    access_atomic = 2,
    access_uncounted = 4,  // counted elsewhere
    access_matrix = 8,     // a row of a matrix, by ldmatrix
};
extern bool checking;
void check_access(const void* address, size_t bytes, unsigned access, const Place& place);
void checker_start_launch();
void checker_start_block();
void checker_barrier();
void checker_sync_warp(unsigned warp, unsigned lanes);
void checker_end_launch();
enum class Contents : unsigned char { uninitialised, initialised };
// `allocation` is where the memory that holds the region begins.
void add_region(void* base, const void* allocation, size_t bytes, size_t period, size_t used,
                Contents contents, bool writable, bool shared, const char* name);
// The address if allocations began at multiples of 256, as they do on a device.
uintptr_t as_on_a_device(const void* address);
void forget_shared_regions();
void forget_all_regions();
void set_access_limit(uint64_t limit);
void misaligned_access(const void* address, size_t alignment, Place place);
void mark_pending(void* destination, size_t bytes);
void mark_written(void* destination, size_t bytes);

// ---- counts (counts.cpp) ------------------------------------------------------------------------
enum class Operation : unsigned { load, store, atomic, async_copy, matrix_load };
constexpr uintptr_t no_access = 0;  // of a lane that takes no part
struct Request {                    // one instruction of a warp
    Operation operation;
    bool shared;
    unsigned width;  // bytes of a lane
    uintptr_t address[warp_size];
    uintptr_t destination[warp_size];  // of the global side of a cp.async
};
struct Counts {
    uint64_t requests, bytes, sectors, ideal_sectors, wavefronts, ideal_wavefronts;
};
struct CountedSite {  // accesses of one kind from one place
    Place place;
    Operation operation;
    bool shared;
    unsigned width;  // bytes
    Counts counts;
};
// It as Python reads it.
struct CountView {
    PlaceView place;
    uint32_t operation, shared;
    Counts counts;
};
void tally(const Request& request, Counts& counts);  // tally.cpp
extern bool counting;
extern std::vector<CountedSite> counted_sites;
// Count anew from now on. Code from `starts[i]` on, as addresses relative to the library's start, is of
// statement `statements[i]`; 0: of one whose accesses stand each for themselves.
void start_counting(const uint64_t* starts, const uint32_t* statements, size_t count);
// Addresses are those of `as_on_a_device`.
void count_access(uintptr_t address, size_t bytes, Operation operation, bool shared,
                  const Place& place);
// cp.async, which moves `bytes` in one request; `from` is 0 where nothing is read.
void count_async(uintptr_t to, uintptr_t from, size_t bytes, Site site);
void begin_leg();  // the running thread has come to a place that all lanes come to equally often
void lanes_meet(unsigned warp);
void all_lanes_meet();

// ---- shared memory (arena.cpp) --------------------------------------------------------------------
void arena_start_launch(size_t dynamic_bytes);
void arena_start_block();

}  // namespace cuverify_host
