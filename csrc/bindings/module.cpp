// The Python module of the core: one class, a few functions. The only folder that includes nanobind.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../kernels/cpu.h"
#include "native_model.h"

namespace kvarn {

using namespace nb::literals;

void bind_kernels(nb::module_& m);   // kernels.cpp
void bind_probe(nb::module_& m);     // probe.cpp
void bind_quantize(nb::module_& m);  // quantize.cpp

namespace {

// Ticks from the begin to the end of regions, and of all threads in their tasks.
std::pair<uint64_t, uint64_t> region_ticks(const ThreadTeam& team) {
    require(team.times() != nullptr, "this team is not timed");
    uint64_t busy = 0;
    for (const RegionTimes::Busy& worker : team.times()->busy) busy += worker.ticks;
    return {team.times()->in_regions, busy};
}

std::map<std::string, std::pair<uint64_t, uint64_t>> kernel_ticks() {
    std::map<std::string, std::pair<uint64_t, uint64_t>> found;
    for (const auto& [name, time] : kernel_times()) found[name] = {time.calls, time.ticks};
    return found;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kvarn's native CPU core";
    nb::set_leak_warnings(false);  // the thread pool lives as long as the process, which is no leak
    nb::class_<ThreadTeam>(m, "ThreadTeam")
        .def(nb::init<int, bool>(), "num_threads"_a, "is_timed"_a = false, nb::call_guard<ReleasedGil>())
        .def_prop_ro("num_threads", &ThreadTeam::num_threads)
        .def_prop_ro("progress", &ThreadTeam::progress)
        .def("region_ticks", &region_ticks);
    m.def("ticks", &ticks);
    m.def("kernel_ticks", &kernel_ticks);
    m.def("pool_threads", [] {
        ReleasedGil release;  // growing may wait for a step
        return ThreadPool::of_process(1).num_threads();
    });
    nb::class_<RunningForward>(m, "ResumableForward").def_prop_ro("piece_s", &RunningForward::piece_s);
    nb::class_<Adapter>(m, "Adapter").def_prop_ro("num_bytes", &Adapter::bytes);
    nb::class_<NativeModel>(m, "Model")
        .def(nb::init<nb::handle, std::shared_ptr<ThreadTeam>, const std::string&>(), "spec"_a, "pool"_a, "isa"_a)
        .def_prop_ro("isa", &NativeModel::isa)
        .def_prop_ro("scratch_bytes", &NativeModel::scratch_bytes)
        .def_prop_ro("logit_bytes", &NativeModel::logit_bytes)
        .def("reserve_weights", &NativeModel::reserve_weights)
        .def("add_matrices", &NativeModel::add_matrices)
        .def("add_vector", &NativeModel::add_vector)
        .def("finish_loading", &NativeModel::finish_loading)
        .def("replace_matrices", &NativeModel::replace_matrices)
        .def("restore_matrices", &NativeModel::restore_matrices)
        .def("reserve_kv", &NativeModel::reserve_kv)
        .def("reserve_states", &NativeModel::reserve_states)
        .def("return_state", &NativeModel::return_state, "slot"_a)
        .def("copy_block", &NativeModel::copy_block)
        .def("block_bytes", &NativeModel::block_bytes)
        .def("populate_blocks", &NativeModel::populate_blocks, nb::call_guard<ReleasedGil>())
        .def("return_block", &NativeModel::return_block)
        .def("forward", &NativeModel::forward)
        .def("forward_from", &NativeModel::forward_from)
        .def("embed_tokens", &NativeModel::embed_tokens)
        .def("begin", &NativeModel::begin)
        .def("advance", &NativeModel::advance)
        .def("make_adapter", &NativeModel::make_adapter, nb::keep_alive<0, 1>())
        .def("logits", &NativeModel::logits)
        .def("sample", &NativeModel::sample)
        .def("score", &NativeModel::score)
        .def("observe_inputs", &NativeModel::observe_inputs)
        .def("read_inputs", &NativeModel::read_inputs)
        .def("keep_rows", &NativeModel::keep_rows)
        .def("num_kept", &NativeModel::num_kept)
        .def("take_rows", &NativeModel::take_rows);
    m.def("packed_bytes", [](int type, int parts, int rows, int columns) {
        require(type >= 0 && type < kNumTypes && parts > 0 && rows > 0 && columns > 0, "bad matrix shape");
        return Weights::packed_bytes(static_cast<Type>(type), parts, rows, columns);
    });
    m.attr("kv_block_size") = kKVBlock;
    m.attr("sampling_record") = sampling_record();
    bind_quantize(m);
    m.def("cpu_features", &cpu_features);
    m.def("isa_names", &kernel_tables);
    m.def("kernel_origins", &kernel_origins);
    nb::module_ kernels = m.def_submodule("kernels", "The kernels one by one, for tests and benchmarks");
    bind_kernels(kernels);
    bind_probe(kernels);
}

}  // namespace kvarn
