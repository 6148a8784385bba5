// A table whose kernels note how long they took and otherwise are those of another: where a step's time goes, without a
// line in the model's code. For profiles only: the counters are the process's, one table at a time.
#pragma once
#include <map>
#include <string>

#include "table.h"

namespace kvarn {

struct KernelTime {
    uint64_t calls = 0, ticks = 0;
};

// The kernels of base, timed. base must outlive the process; a second, other one is refused.
const KernelTable& timed_table(const KernelTable& base);

// By kernel, of all threads, since the process began; call it while no kernel runs.
std::map<std::string, KernelTime> kernel_times();

}  // namespace kvarn
