// A program that runs one launch which a file describes, under the address and undefined-behaviour
// sanitizers, and leaves in another file what they found and what the kernel wrote.
//
//   program <launch file> <result file>
//
// Every argument gets a heap block of exactly its size, at the alignment that it had, so that a byte
// too far is somebody else's. Both files are read and written by cuverify/host/standalone.py.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include "../runtime/sanitizer.h"
#include "../runtime/state.h"

#ifndef CUVERIFY_ASAN
#error "the program is built with -fsanitize=address"
#endif

extern "C" {
const void* __asan_get_report_pc();
const void* __asan_get_report_address();
int __asan_get_report_access_type();
size_t __asan_get_report_access_size();
const char* __asan_get_report_description();
void __ubsan_get_current_report_data(const char** kind, const char** message, const char** file,
                                     unsigned* line, unsigned* column, char** memory);
void cuverify_configure(int check, unsigned schedule, uint64_t seed, unsigned mma_model,
                        uint64_t max_accesses);
uint32_t cuverify_fault_count();
void cuverify_fault(uint32_t index, cuverify_host::FaultView* to);
}

extern const cuverify_host::KernelEntry cuverify_kernels[];

namespace {

using cuverify_host::LaunchConfig;

struct Header {
    char kernel[128];
    LaunchConfig config;
    uint32_t schedule, mma_model, seconds;
    uint64_t seed;
    uint32_t blocks, arguments, moves;
};
struct BlockEntry {
    uint64_t bytes, misalignment;  // its address had this remainder by `alignment`
    uint64_t period, used;         // rows of `used` bytes every `period`; 0: dense
    uint32_t writable;
    char name[64];
};
struct ArgumentEntry {
    uint32_t block1;  // 0: `value` is the argument; else it is an offset into that block
    uint64_t value;
};
struct MoveEntry {  // an address that a pointer table holds
    uint32_t block, target;
    uint64_t at, offset;
};
constexpr size_t alignment = 256, deepest = 16;

struct Frames {
    uint64_t pc[deepest];
};
Frames frames[100];  // of the faults that sanitizers reported, by the fault's number
const char* result_path;
bool completed;

uint64_t relative(const void* pc) {
    auto at = static_cast<const char*>(pc);
    return at >= __ehdr_start && at < _end ? static_cast<uint64_t>(at - __ehdr_start) - 1 : 0;
}

// Note a sanitizer's report; `pc` is where, if it knows.
void note(const char* kind, const std::string& message, cuverify_host::Place place,
          const void* address, size_t bytes, const void* pc) {
    size_t number = cuverify_host::faults.size();
    cuverify_host::Fault fault{kind, message, cuverify_host::here(place)};
    fault.bytes = static_cast<uint32_t>(bytes);
    if (address && !cuverify_host::on_a_fiber_stack(address))
        fault.region = cuverify_host::region_part(address);
    cuverify_host::record(std::move(fault));
    if (cuverify_host::faults.size() == number || number >= std::size(frames)) return;
    void* found[deepest];
    int depth = backtrace(found, deepest);
    uint64_t* to = frames[number].pc;
    if (uint64_t at = pc ? relative(pc) : 0) *to++ = at;
    for (int i = 0; i < depth && to < frames[number].pc + deepest; ++i)
        if (uint64_t at = relative(found[i])) *to++ = at;
}

void put(FILE* file, const void* data, size_t bytes) {
    if (bytes && fwrite(data, bytes, 1, file) != 1) _exit(3);
}

void write_faults(FILE* file) {
    uint32_t count = cuverify_fault_count(), ended = completed;
    put(file, &ended, sizeof ended);
    put(file, &count, sizeof count);
    for (uint32_t i = 0; i < count; ++i) {
        cuverify_host::FaultView view;
        cuverify_fault(i, &view);
        put(file, &view, sizeof view);
        put(file, &frames[i], sizeof frames[i]);
    }
}

void leave() {
    FILE* file = fopen(result_path, "wb");
    if (!file) _exit(3);
    write_faults(file);
    fclose(file);
}

void on_alarm(int) {
    note("time-limit", "the launch has not ended in its time", {nullptr, 0, 0}, nullptr, 0,
         nullptr);
    leave();
    _exit(0);
}

void take(FILE* file, void* to, size_t bytes) {
    if (bytes && fread(to, bytes, 1, file) != 1) {
        fprintf(stderr, "the launch file ends too early\n");
        exit(3);
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void __asan_on_error() {
    std::string text = __asan_get_report_description();
    size_t bytes = __asan_get_report_access_size();
    if (bytes)
        text += std::string(": ") + (__asan_get_report_access_type() ? "write" : "read") + " of " +
                std::to_string(bytes) + " bytes";
    note("address-sanitizer", text, {nullptr, 0, relative(__asan_get_report_pc())},
         __asan_get_report_address(), bytes, __asan_get_report_pc());
    leave();
}

void __ubsan_on_report() {
    const char *kind, *message, *file;
    unsigned line, column;
    char* memory;
    __ubsan_get_current_report_data(&kind, &message, &file, &line, &column, &memory);
    static std::set<std::string> names;  // a fault keeps the pointer
    file = names.insert(file ? file : "?").first->c_str();
    note("undefined-behaviour", message, {file, static_cast<int>(line), 0}, memory, 0, nullptr);
}
}
#pragma GCC visibility pop

int main(int count, char** words) {
    if (count != 3) return 3;
    result_path = words[2];
    FILE* file = fopen(words[1], "rb");
    if (!file) return 3;
    Header header;
    take(file, &header, sizeof header);
    std::vector<BlockEntry> entries(header.blocks);
    std::vector<ArgumentEntry> given(header.arguments);
    std::vector<MoveEntry> moves(header.moves);
    take(file, entries.data(), entries.size() * sizeof(BlockEntry));
    take(file, given.data(), given.size() * sizeof(ArgumentEntry));
    take(file, moves.data(), moves.size() * sizeof(MoveEntry));

    std::vector<char*> blocks;
    for (const BlockEntry& entry : entries) {
        void* room = nullptr;
        if (posix_memalign(&room, alignment, entry.misalignment + entry.bytes)) return 3;
        char* block = static_cast<char*>(room) + entry.misalignment;
        take(file, block, entry.bytes);
        cuverify_host::forbid(room, entry.misalignment);
        if (entry.period)
            for (uint64_t row = 0; row + entry.used < entry.bytes; row += entry.period)
                cuverify_host::forbid(block + row + entry.used, entry.period - entry.used);
        cuverify_host::add_region(block, block, entry.bytes, 0, 0,
                                  cuverify_host::Contents::initialised, true, false, entry.name);
        blocks.push_back(block);
    }
    fclose(file);
    for (const MoveEntry& move : moves) {
        char* address = blocks[move.target] + move.offset;
        memcpy(blocks[move.block] + move.at, &address, sizeof address);
    }
    std::vector<uint64_t> values;
    for (const ArgumentEntry& cell : given)
        values.push_back(cell.block1
                             ? reinterpret_cast<uint64_t>(blocks[cell.block1 - 1]) + cell.value
                             : cell.value);
    std::vector<void*> arguments;
    for (uint64_t& value : values) arguments.push_back(&value);

    const cuverify_host::KernelEntry* kernel = cuverify_kernels;
    while (kernel->name && strcmp(kernel->name, header.kernel)) ++kernel;
    if (!kernel->name || !cuverify_host::use_stacks(nullptr)) return 3;
    cuverify_configure(0, header.schedule, header.seed, header.mma_model, UINT64_MAX);
    signal(SIGALRM, on_alarm);
    alarm(header.seconds);
    kernel->launch(&header.config, arguments.data());
    alarm(0);
    completed = !cuverify_host::faulted();

    FILE* result = fopen(result_path, "wb");
    if (!result) return 3;
    write_faults(result);
    for (size_t i = 0; completed && i < blocks.size(); ++i) {
        if (!entries[i].writable) continue;
        cuverify_host::allow(blocks[i], entries[i].bytes);
        put(result, blocks[i], entries[i].bytes);
    }
    return fclose(result) ? 3 : 0;
}
