// The Python face of the core: one class, a few functions. The only folder that includes nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../base/check.h"
#include "../kernels/cpu.h"
#include "choices.h"
#include "spec.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarn {

void bind_kernels(nb::module_& m);  // kernels.cpp
void bind_probe(nb::module_& m);    // probe.cpp

namespace {

template <class T>
using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A loaded model with its cache, head and sampler. Arrays for results are made by Python.
class NativeModel {
public:
    NativeModel(nb::handle spec, std::shared_ptr<ThreadTeam> pool, const std::string& isa)
        : kernels_(select_table(isa.c_str())), model_(read_spec(spec), kernels_, pool), head_(model_),
          sampler_(kernels_, model_.spec().vocab_size, pool->num_threads()), pool_(std::move(pool)) {}

    const char* isa() const { return kernels_.name; }

    void reserve_weights(size_t bytes) { model_.weights().reserve(bytes); }

    void add_matrices(const std::string& name, int type, int parts, int rows, int columns, In1<uint8_t> raw) {
        Type t = checked_type(type);
        BlockShape shape = block_shape(t);
        size_t values = static_cast<size_t>(parts) * static_cast<size_t>(rows) * static_cast<size_t>(columns);
        require(parts > 0 && rows > 0 && columns > 0 &&
                    raw.size() == values / static_cast<size_t>(shape.values) * static_cast<size_t>(shape.bytes),
                name + ": the tensor's bytes do not match its shape");
        nb::gil_scoped_release release;
        std::lock_guard turn(pool_->turn());
        model_.weights().add_matrices(name, t, parts, rows, columns, raw.data(), *pool_);
    }

    void add_vector(const std::string& name, In1<float> values) {
        model_.weights().add_vector(name, {values.data(), values.data() + values.size()});
    }

    void finish_loading() { model_.finish_loading(); }

    void reserve_kv(const std::vector<std::pair<int, int>>& layers, const std::string& dtype, int num_blocks,
                    size_t block_bytes) {
        require(layers.size() == model_.spec().blocks.size(), "the KV layout must name every layer");
        for (size_t i = 0; i < layers.size(); ++i) {
            const AttentionSpec& a = model_.spec().blocks[i].attention;
            require(layers[i] == std::pair(a.num_kv_heads, a.head_dim), "the KV layout does not match the model");
        }
        require(num_blocks > 0, "the cache needs at least one block");
        model_.cache().reserve(layers, kv_type_named(dtype), num_blocks, block_bytes);
    }

    void copy_block(int source, int target) {
        check_block(source);
        check_block(target);
        model_.cache().copy(source, target);
    }

    void return_block(int block) {
        check_block(block);
        model_.cache().release_pages(block);
    }

    void forward(In1<int32_t> token_ids, In1<int32_t> positions, In1<int32_t> row_starts, In1<int32_t> context_lens,
                 In2<int32_t> block_tables, In1<int32_t> output_rows, Out2<float> out) {
        BatchView batch = read_batch(token_ids, positions, row_starts, context_lens, block_tables);
        check_states(output_rows.size(), out);
        nb::gil_scoped_release release;
        model_.forward(batch, view(output_rows), out.data());
    }

    // The arrays must live as long as the passage: Python's passage keeps them.
    Passage begin(In1<int32_t> token_ids, In1<int32_t> positions, In1<int32_t> row_starts, In1<int32_t> context_lens,
                  In2<int32_t> block_tables, In1<int32_t> output_rows) {
        BatchView batch = read_batch(token_ids, positions, row_starts, context_lens, block_tables);
        nb::gil_scoped_release release;
        return model_.begin(batch, view(output_rows));
    }

    bool advance(Passage& passage, double seconds, Out2<float> out) {
        check_states(passage.output_rows.size(), out);
        nb::gil_scoped_release release;
        return model_.advance(passage, seconds, out.data());
    }

    void logits(In2<float> hidden, Out2<float> out) {
        check_hidden(hidden);
        size_t vocab = static_cast<size_t>(head_.vocab_size());
        require(out.shape(0) == hidden.shape(0) && out.shape(1) == vocab, "the output array has the wrong shape");
        nb::gil_scoped_release release;
        head_.for_each_row(hidden.data(), static_cast<int>(hidden.shape(0)), [&](int row, float* values, int) {
            std::copy_n(values, vocab, out.data() + static_cast<size_t>(row) * vocab);
        });
    }

    // choices: one per row. entropy and logprobs are filled only when want_logprobs.
    void sample(In2<float> hidden, const ChoiceArrays& arrays, bool want_logprobs, Out1<int32_t> ids,
                Out1<float> logprobs, Out1<float> entropy, Out2<int32_t> top_ids, Out2<float> top_logprobs) {
        check_hidden(hidden);
        const std::vector<Choice> choices = read_choices(arrays);
        require(choices.size() == hidden.shape(0), "one choice is needed for each row");
        require(ids.size() == choices.size() && logprobs.size() == choices.size() && entropy.size() == choices.size(),
                "the arrays for the results have the wrong length");
        for (const Choice& choice : choices) check_choice(choice);
        check_top(hidden, top_ids, top_logprobs);
        nb::gil_scoped_release release;
        head_.for_each_row(hidden.data(), static_cast<int>(hidden.shape(0)), [&](int row, float* values, int worker) {
            size_t r = static_cast<size_t>(row);
            double log_total = 0, row_entropy = 0;
            if (want_logprobs) {
                log_total = sampler_.log_sum_exp(values);
                row_entropy = sampler_.entropy(values, log_total);
                sampler_.most_probable(values, log_total, top_of(top_ids, top_logprobs, r), worker);
            }
            // The choice adjusts the row in place; log-probabilities are of the plain one.
            std::vector<float>& plain = plain_[static_cast<size_t>(worker)];
            if (want_logprobs) plain.assign(values, values + head_.vocab_size());
            int32_t id = sampler_.choose(choices[r], values, worker);
            ids.data()[r] = id;
            logprobs.data()[r] =
                want_logprobs && id != Sampler::kNoToken
                    ? static_cast<float>(static_cast<double>(plain[static_cast<size_t>(id)]) - log_total)
                    : 0.0f;
            entropy.data()[r] = static_cast<float>(row_entropy);
        });
    }

    void score(In2<float> hidden, In1<int32_t> targets, Out1<float> logprobs, Out2<int32_t> top_ids,
               Out2<float> top_logprobs) {
        check_hidden(hidden);
        require(targets.size() == hidden.shape(0) && logprobs.size() == targets.size(),
                "one target is needed for each row");
        for (int32_t id : view(targets)) check_token(id);
        check_top(hidden, top_ids, top_logprobs);
        nb::gil_scoped_release release;
        head_.for_each_row(hidden.data(), static_cast<int>(hidden.shape(0)), [&](int row, float* values, int worker) {
            size_t r = static_cast<size_t>(row);
            double log_total = sampler_.log_sum_exp(values);
            logprobs.data()[r] = static_cast<float>(static_cast<double>(values[targets.data()[r]]) - log_total);
            sampler_.most_probable(values, log_total, top_of(top_ids, top_logprobs, r), worker);
        });
    }

    size_t scratch_bytes() const { return model_.scratch_bytes(); }

private:
    static BatchView read_batch(const In1<int32_t>& token_ids, const In1<int32_t>& positions,
                                const In1<int32_t>& row_starts, const In1<int32_t>& context_lens,
                                const In2<int32_t>& block_tables) {
        size_t sequences = context_lens.size();
        require(positions.size() == token_ids.size() && row_starts.size() == sequences + 1 &&
                    block_tables.shape(0) == sequences && sequences > 0,
                "the arrays of the batch do not fit together");
        return {static_cast<int>(token_ids.size()),
                static_cast<int>(sequences),
                static_cast<int>(block_tables.shape(1)),
                token_ids.data(),
                positions.data(),
                row_starts.data(),
                context_lens.data(),
                block_tables.data()};
    }
    void check_states(size_t rows, const Out2<float>& out) const {
        require(out.shape(0) == rows && out.shape(1) == static_cast<size_t>(model_.spec().width),
                "the output array has the wrong shape");
    }
    static Type checked_type(int type) {
        require(type >= 0 && type < kNumTypes, "unknown tensor type");
        block_shape(static_cast<Type>(type));
        return static_cast<Type>(type);
    }
    void check_block(int block) {
        require(block >= 0 && block < model_.cache().num_blocks(),
                "block id " + std::to_string(block) + " is outside the cache");
    }
    void check_token(int32_t id) const {
        require(id >= 0 && id < head_.vocab_size(),
                [&] { return "token id " + std::to_string(id) + " is outside the vocabulary"; });
    }
    void check_hidden(const In2<float>& hidden) const {
        require(model_.plan().head != nullptr, "this model has no language-model head");
        require(hidden.shape(1) == static_cast<size_t>(model_.spec().width), "hidden states have the wrong width");
    }
    void check_choice(const Choice& choice) const {
        for (int32_t id : choice.bias_ids) check_token(id);
        for (int32_t id : choice.seen_ids) check_token(id);
        size_t words = (static_cast<size_t>(head_.vocab_size()) + 31) / 32;
        require(choice.mask.empty() || choice.mask.size() == words, "a mask does not fit the vocabulary");
    }
    void check_top(const In2<float>& hidden, const Out2<int32_t>& ids, const Out2<float>& logprobs) const {
        require(ids.shape(0) == hidden.shape(0) && logprobs.shape(0) == hidden.shape(0) &&
                    ids.shape(1) == logprobs.shape(1) && ids.shape(1) <= static_cast<size_t>(head_.vocab_size()),
                "the arrays for the most probable tokens have the wrong shape");
    }
    static Top top_of(const Out2<int32_t>& ids, const Out2<float>& logprobs, size_t row) {
        size_t count = ids.shape(1);
        return {ids.data() + row * count, logprobs.data() + row * count, static_cast<int>(count)};
    }

    const KernelTable& kernels_;
    Model model_;
    Head head_;
    Sampler sampler_;
    std::shared_ptr<ThreadTeam> pool_;
    std::vector<std::vector<float>> plain_ = std::vector<std::vector<float>>(static_cast<size_t>(pool_->num_threads()));
};

// Which table each kernel of a table really comes from: entries it does not override are its parent's.
std::map<std::string, std::string> kernel_isas(const std::string& isa) {
    const KernelTable& table = select_table(isa.c_str());
    const KernelTable& parent = scalar::table;
    std::map<std::string, std::string> found;
    auto note = [&](const std::string& kernel, auto own, auto inherited) {
        found[kernel] = own != inherited ? table.name : parent.name;
    };
    const std::pair<Type, const char*> types[] = {
        {Type::F32, "f32"},   {Type::F16, "f16"},   {Type::BF16, "bf16"}, {Type::Q4_0, "q4_0"},    {Type::Q4_1, "q4_1"},
        {Type::Q5_0, "q5_0"}, {Type::Q5_1, "q5_1"}, {Type::Q8_0, "q8_0"}, {Type::Q2_K, "q2_k"},    {Type::Q3_K, "q3_k"},
        {Type::Q4_K, "q4_k"}, {Type::Q5_K, "q5_k"}, {Type::Q6_K, "q6_k"}, {Type::IQ4_NL, "iq4_nl"}};
    for (auto [type, name] : types) {
        size_t t = static_cast<size_t>(type);
        note(std::string("matmul_") + name, table.matmul[t], parent.matmul[t]);
    }
    note("quantize_row", table.quantize_row, parent.quantize_row);
    note("rms_norm", table.rms_norm, parent.rms_norm);
    note("layer_norm", table.layer_norm, parent.layer_norm);
    note("add", table.add, parent.add);
    note("silu_mul", table.silu_mul, parent.silu_mul);
    note("gelu_tanh_mul", table.gelu_tanh_mul, parent.gelu_tanh_mul);
    note("gelu", table.gelu, parent.gelu);
    note("attend_f16", table.attend_f16, parent.attend_f16);
    note("attend_f32", table.attend_f32, parent.attend_f32);
    note("attend_q8_0", table.attend_q8_0, parent.attend_q8_0);
    note("store_kv_f16", table.store_kv_f16, parent.store_kv_f16);
    note("store_kv_f32", table.store_kv_f32, parent.store_kv_f32);
    note("store_kv_q8_0", table.store_kv_q8_0, parent.store_kv_q8_0);
    note("argmax", table.argmax, parent.argmax);
    note("sum_exp", table.sum_exp, parent.sum_exp);
    return found;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kvarn's native CPU core";
    nb::set_leak_warnings(false);  // the thread pool lives as long as the process, which is no leak
    nb::class_<ThreadTeam>(m, "ThreadTeam")
        .def(nb::init<int>(), "num_threads"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("num_threads", &ThreadTeam::num_threads)
        .def_prop_ro("progress", &ThreadTeam::progress);
    m.def("pool_threads", [] {
        nb::gil_scoped_release release;  // growing may wait for a step
        return ThreadPool::of_process(1).num_threads();
    });
    nb::class_<Passage>(m, "Passage");
    nb::class_<NativeModel>(m, "Model")
        .def(nb::init<nb::handle, std::shared_ptr<ThreadTeam>, const std::string&>(), "spec"_a, "pool"_a, "isa"_a)
        .def_prop_ro("isa", &NativeModel::isa)
        .def_prop_ro("scratch_bytes", &NativeModel::scratch_bytes)
        .def("reserve_weights", &NativeModel::reserve_weights)
        .def("add_matrices", &NativeModel::add_matrices)
        .def("add_vector", &NativeModel::add_vector)
        .def("finish_loading", &NativeModel::finish_loading)
        .def("reserve_kv", &NativeModel::reserve_kv)
        .def("copy_block", &NativeModel::copy_block)
        .def("return_block", &NativeModel::return_block)
        .def("forward", &NativeModel::forward)
        .def("begin", &NativeModel::begin)
        .def("advance", &NativeModel::advance)
        .def("logits", &NativeModel::logits)
        .def("sample", &NativeModel::sample)
        .def("score", &NativeModel::score);
    m.def("packed_bytes", [](int type, int parts, int rows, int columns) {
        require(type >= 0 && type < kNumTypes && parts > 0 && rows > 0 && columns > 0, "bad matrix shape");
        return Weights::packed_bytes(static_cast<Type>(type), parts, rows, columns);
    });
    m.attr("kv_block_size") = kKVBlock;
    m.def("cpu_features", &cpu_features);
    m.def("isa_names", &kernel_tables);
    m.def("kernel_isas", &kernel_isas);
    nb::module_ kernels = m.def_submodule("kernels", "The kernels one by one, for tests and benchmarks");
    bind_kernels(kernels);
    bind_probe(kernels);
}

}  // namespace kvarn
