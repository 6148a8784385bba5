// This machine's limits, beside the kernels they are compared with: kvarn.backends.native._native.kernels.
#include <nanobind/stl/string.h>

#include <algorithm>

#include "../base/check.h"
#include "../base/probe.h"
#include "../kernels/cpu.h"
#include "arrays.h"
#include "released_gil.h"

namespace kvarn {

using namespace nb::literals;

void bind_probe(nb::module_& m);

namespace {

double dot_rate(const std::string& table, double seconds) {
    const auto usable = kernel_tables();
    require(std::find(usable.begin(), usable.end(), table) != usable.end(), "no kernel table '" + table + "'");
    ReleasedGil release;
    return probe_dot(table, seconds);
}

double read_rate(In1<uint8_t> data, double seconds) {
    require(data.size() >= kProbeChunk, "the data has less than a chunk of 1 MiB");
    const uint8_t* first = data.data();
    const size_t size = data.size();
    ReleasedGil release;
    return probe_read(first, size, seconds);
}

}  // namespace

void bind_probe(nb::module_& m) {
    m.def("dot_rate", dot_rate, "table"_a, "seconds"_a);
    m.def("read_rate", read_rate, "data"_a, "seconds"_a);
}

}  // namespace kvarn
