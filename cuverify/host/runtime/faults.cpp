#include <cstdarg>
#include <cstdio>
#include <tuple>
#include <set>

#include "state.h"

namespace cuverify_host {

namespace {
constexpr size_t max_faults = 100;
using Key = std::tuple<std::string, const char*, int, uint64_t, uint64_t, std::string>;
std::set<Key> seen;
bool stopped;
}  // namespace

std::vector<Fault> faults;

void clear_faults() {
    faults.clear();
    seen.clear();
    stopped = false;
}

bool faulted() { return stopped; }

Place place_of(Site site) { return {site.file, site.line, 0}; }

Actor here(Place place) { return {block.linear, self ? self->index : 0, place}; }

void record(Fault fault) {
    Key key{
        fault.kind,
        fault.actor.place.file,
        fault.actor.place.line,
        fault.actor.place.pc,
        fault.other ? fault.other->place.pc ^ static_cast<uint64_t>(fault.other->place.line) : 0,
        fault.region ? fault.region->name : std::string()};
    if (faults.size() < max_faults && seen.insert(key).second) faults.push_back(std::move(fault));
}

void stop(Fault fault) {
    record(std::move(fault));
    stopped = true;
    leave_launch();
}

void fault(const char* kind, Site site, const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    stop({kind, text, here(place_of(site))});
}

}  // namespace cuverify_host
