// The core's model as Python sees it: arguments checked, then the work with the interpreter let go.
#pragma once
#include <mutex>

#include "../base/check.h"
#include "../kernels/timed.h"
#include "adapter.h"
#include "batch.h"
#include "released_gil.h"
#include "sampling.h"
#include "spec.h"

namespace kvarn {

// A forward pass under way with the arrays it reads.
struct RunningForward {
    Batch batch;
    ResumableForward state;
    double piece_s() const { return state.piece_s(); }
};

inline const KernelTable& kernels_for(const ThreadTeam& team, const std::string& isa) {
    const KernelTable& table = select_table(isa.c_str());
    return team.times() == nullptr ? table : timed_table(table);
}

// A loaded model with its cache, head and sampler. Arrays for results are made by Python.
class NativeModel {
public:
    NativeModel(nb::handle spec, std::shared_ptr<ThreadTeam> pool, const std::string& isa)
        : kernels_(kernels_for(*pool, isa)), model_(read_spec(spec), kernels_, pool),
          chooser_(model_, kernels_, pool->num_threads()), pool_(std::move(pool)) {}

    const char* isa() const { return kernels_.name; }

    void reserve_weights(size_t bytes) { model_.weights().reserve(bytes); }

    void add_matrices(const std::string& name, int type, int parts, int rows, int columns, In1<uint8_t> raw) {
        Type t = checked_type(type);
        BlockShape shape = block_shape(t);
        size_t values = static_cast<size_t>(parts) * static_cast<size_t>(rows) * static_cast<size_t>(columns);
        require(parts > 0 && rows > 0 && columns > 0 &&
                    raw.size() == values / static_cast<size_t>(shape.values) * static_cast<size_t>(shape.bytes),
                name + ": the tensor's bytes do not match its shape");
        ReleasedGil release;
        model_.weights().add_matrices(name, t, parts, rows, columns, raw.data(), *pool_);
    }

    void add_vector(const std::string& name, In1<float> values) {
        model_.weights().add_vector(name, {values.data(), values.data() + values.size()});
    }

    void finish_loading() { model_.finish_loading(); }

    void replace_matrices(const std::string& name, int type, In1<uint8_t> raw) {
        ReleasedGil release;
        model_.weights().replace_matrices(name, checked_type(type), view(raw), *pool_);
        model_.finish_loading();
    }

    void restore_matrices(const std::string& name) {
        model_.weights().restore_matrices(name);
        model_.finish_loading();
    }

    // Layers named in windowed, if any, have blocks of their own.
    void reserve_kv(const std::vector<std::pair<int, int>>& layers, const std::string& dtype, int num_blocks,
                    size_t block_bytes, const std::vector<bool>& windowed, int num_window_blocks,
                    size_t window_block_bytes) {
        const std::vector<BlockSpec>& blocks = model_.spec().blocks;
        require(layers.size() == blocks.size() && (windowed.empty() || windowed.size() == blocks.size()),
                "the KV layout must name every layer");
        std::vector<KVCache::Shape> full, window;
        for (size_t i = 0; i < layers.size(); ++i) {
            const AttentionSpec& a = blocks[i].attention;
            const bool has_keys = a.kv_source < 0;
            require(layers[i] == (has_keys ? std::pair(a.num_kv_heads, a.head_dim) : std::pair(0, 0)),
                    "the KV layout does not match the model");
            bool is_windowed = !windowed.empty() && windowed[a.kv_layer(i)];
            require(!is_windowed || a.window > 0, "a layer without a window keeps all tokens");
            KVCache::Shape shape{layers[i].first, layers[i].second, !a.latent.exists()};
            full.push_back(is_windowed ? KVCache::Shape{0, 0, true} : shape);
            window.push_back(is_windowed ? shape : KVCache::Shape{0, 0, true});
        }
        require(num_blocks > 0 && (windowed.empty() || num_window_blocks > 0), "the cache needs at least one block");
        model_.cache().reserve(full, kv_type_named(dtype), num_blocks, block_bytes);
        if (!windowed.empty())
            model_.cache(true).reserve(window, kv_type_named(dtype), num_window_blocks, window_block_bytes);
        model_.keep_windows(windowed);
    }

    void reserve_states(int num_slots) {
        std::vector<size_t> floats;
        for (const BlockSpec& block : model_.spec().blocks) floats.push_back(block.recurrent.state_floats());
        require(num_slots > 0, "a model with states needs at least one slot");
        model_.states().reserve(floats, num_slots);
    }

    void return_state(int slot) {
        require(slot >= 0 && slot < model_.states().num_slots(), "a state's slot is outside the store");
        model_.states().release(slot);
    }

    void copy_block(int source, int target, bool is_windowed) {
        KVCache& cache = model_.cache(is_windowed);
        cache.check_block(source);
        cache.check_block(target);
        cache.copy(source, target);
    }

    // A block of the layers that keep all as it lies in the cache, in the layout of model/kv.h.
    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> block_bytes(int block) {
        model_.cache().check_block(block);
        const std::span<uint8_t> bytes = model_.cache().bytes(block);
        return {bytes.data(), {bytes.size()}, nb::find(this)};
    }

    void populate_blocks(int count) { model_.cache().populate(0, count); }

    void return_block(int block, bool is_windowed) {
        model_.cache(is_windowed).check_block(block);
        model_.cache(is_windowed).release_pages(block);
    }

    void forward(nb::handle python_batch, Out2<float> out) {
        const Batch batch(python_batch);
        check_states(batch.output_rows().size(), out);
        const BatchView view = batch.view();
        ReleasedGil release;
        model_.forward(view, batch.output_rows(), out.data());
    }

    void embed_tokens(In1<int32_t> ids, Out2<float> out) {
        check_states(ids.size(), out);
        ReleasedGil release;
        model_.embed_tokens(view(ids), out.data());
    }

    // From a layer on: see Model::forward_from.
    void forward_from(size_t first, nb::handle python_batch, Out2<float> out, Out1<float> states) {
        const Batch batch(python_batch);
        check_states(batch.output_rows().size(), out);
        const BatchView view = batch.view();
        const size_t layers = model_.spec().blocks.size(), width = static_cast<size_t>(model_.spec().width);
        require(first < layers && states.size() == layers * static_cast<size_t>(view.num_tokens) * width,
                "the states of every layer are needed");
        ReleasedGil release;
        model_.forward_from(first, view, batch.output_rows(), out.data(), states.data());
    }

    RunningForward begin(nb::handle python_batch) {
        Batch batch(python_batch);
        ResumableForward state = [&] {
            ReleasedGil release;
            return model_.begin(batch.view(), batch.output_rows());
        }();
        return {std::move(batch), std::move(state)};
    }

    bool advance(RunningForward& forward, double seconds, Out2<float> out) {
        check_states(forward.batch.output_rows().size(), out);
        ReleasedGil release;
        return model_.advance(forward.state, seconds, out.data());
    }

    std::shared_ptr<Adapter> make_adapter(int type, nb::sequence pairs) const {
        return kvarn::make_adapter(model_, checked_type(type), pairs);
    }

    // adapters: what each row of hidden uses, none of them if it is empty.
    void logits(In2<float> hidden, nb::handle adapters, Out2<float> out) {
        check_hidden(hidden);
        require(out.shape(0) == hidden.shape(0) && out.shape(1) == static_cast<size_t>(chooser_.vocab_size()),
                "the output array has the wrong shape");
        const std::vector<AdapterUses> uses = read_uses(adapters, hidden.shape(0));
        std::vector<HeadRow> rows = all_rows(hidden, uses);
        ReleasedGil release;
        chooser_.logits(rows, out.data());
    }

    // arrays: of each of rows, which are rows of hidden. partners: none, or a row of hidden or -1 for each. means:
    // none, or (rows, width) of canvases: then best_ids and the entropy are theirs, and there are no log-probabilities.
    void sample(In2<float> hidden, nb::handle adapters, In1<int32_t> rows, In1<int32_t> partners,
                const SamplingArrays& arrays, bool want_logprobs, Out1<int32_t> ids, Out1<float> logprobs,
                Out1<float> entropy, Out2<int32_t> top_ids, Out2<float> top_logprobs, Out1<int32_t> best_ids,
                Out2<float> means) {
        check_hidden(hidden);
        const std::vector<RowSampling> params = read_sampling(arrays);
        require(params.size() == rows.size() && (partners.size() == 0 || partners.size() == rows.size()),
                "sampling parameters are needed for each row");
        require(ids.size() == rows.size() && logprobs.size() == rows.size() && entropy.size() == rows.size(),
                "the arrays for the results have the wrong length");
        for (const RowSampling& row : params) check_params(row);
        check_top(rows.size(), top_ids, top_logprobs);
        const std::vector<AdapterUses> uses = read_uses(adapters, hidden.shape(0));
        std::vector<HeadRow> states;
        for (size_t i = 0; i < rows.size(); ++i) {
            int partner = partners.size() == 0 ? -1 : partners.data()[i];
            states.push_back({state_of(hidden, rows.data()[i]), partner < 0 ? nullptr : state_of(hidden, partner),
                              params[i].cfg_scale + 1, params[i].bias_ids, params[i].bias_values,
                              uses.empty() ? nullptr : &uses[static_cast<size_t>(rows.data()[i])]});
        }
        if (means.shape(0) > 0) check_states(rows.size(), means);
        require(best_ids.size() == means.shape(0), "every row of a canvas has a most probable token");
        ReleasedGil release;
        if (means.shape(0) > 0)
            return chooser_.sample_canvas(states, params, ids.data(), {best_ids.data(), entropy.data(), means.data()});
        chooser_.sample(states, params, want_logprobs,
                        {ids.data(), logprobs.data(), entropy.data(), top_ids.data(), top_logprobs.data(),
                         static_cast<int>(top_ids.shape(1))});
    }

    void score(In2<float> hidden, nb::handle adapters, In1<int32_t> targets, Out1<float> logprobs,
               Out2<int32_t> top_ids, Out2<float> top_logprobs) {
        check_hidden(hidden);
        require(targets.size() == hidden.shape(0) && logprobs.size() == targets.size(),
                "one target is needed for each row");
        for (int32_t id : view(targets)) check_token(id);
        check_top(hidden.shape(0), top_ids, top_logprobs);
        const std::vector<AdapterUses> uses = read_uses(adapters, hidden.shape(0));
        std::vector<HeadRow> rows = all_rows(hidden, uses);
        ReleasedGil release;
        chooser_.score(rows, view(targets),
                       {nullptr, logprobs.data(), nullptr, top_ids.data(), top_logprobs.data(),
                        static_cast<int>(top_ids.shape(1))});
    }

    void observe_inputs() {
        std::lock_guard turn(pool_->turn());
        model_.observe_inputs();
    }

    // Sums over the rows that a matrix has read since observe_inputs: squares, magnitudes, the largest, and rows.
    void read_inputs(size_t layer, const std::string& input, Out2<double> squares, Out2<double> magnitudes,
                     Out2<float> largest, Out1<uint64_t> rows) {
        require(layer < model_.spec().blocks.size(), "no such layer");
        const ColumnSums& sums = model_.observed(layer).named(input);
        require(squares.size() == sums.squares.size() && magnitudes.size() == sums.squares.size() &&
                    largest.size() == sums.squares.size() && rows.size() == sums.rows.size(),
                "the arrays for the sums have the wrong shape");
        std::copy(sums.squares.begin(), sums.squares.end(), squares.data());
        std::copy(sums.magnitudes.begin(), sums.magnitudes.end(), magnitudes.data());
        std::copy(sums.largest.begin(), sums.largest.end(), largest.data());
        std::copy(sums.rows.begin(), sums.rows.end(), rows.data());
    }

    void keep_rows(size_t layer, bool keep) { model_.observed(layer).keep_rows(keep); }

    size_t num_kept(size_t layer, const std::string& input, size_t part) {
        return model_.observed(layer).named(input).kept.at(part).size();
    }

    // The rows kept since the last call, one after another; they are forgotten here.
    void take_rows(size_t layer, const std::string& input, size_t part, Out1<float> out) {
        std::vector<float>& kept = model_.observed(layer).named(input).kept.at(part);
        require(out.size() == kept.size(), "the array for the rows has the wrong size");
        std::copy(kept.begin(), kept.end(), out.data());
        kept.clear();
    }

    size_t scratch_bytes() const { return model_.scratch_bytes(); }
    size_t logit_bytes() const { return chooser_.logit_bytes(); }

private:
    void check_states(size_t rows, const Out2<float>& out) const {
        require(out.shape(0) == rows && out.shape(1) == static_cast<size_t>(model_.spec().width),
                "the output array has the wrong shape");
    }
    static Type checked_type(int type) {
        require(type >= 0 && type < kNumTypes, "unknown tensor type");
        block_shape(static_cast<Type>(type));
        return static_cast<Type>(type);
    }
    void check_token(int32_t id) const {
        require(id >= 0 && id < chooser_.vocab_size(),
                [&] { return "token id " + std::to_string(id) + " is outside the vocabulary"; });
    }
    void check_hidden(const In2<float>& hidden) const {
        require(model_.plan().head != nullptr, "this model has no language-model head");
        require(hidden.shape(1) == static_cast<size_t>(model_.spec().width), "hidden states have the wrong width");
    }
    void check_params(const RowSampling& row) const {
        for (int32_t id : row.bias_ids) check_token(id);
        for (int32_t id : row.seen_ids) check_token(id);
        size_t words = (static_cast<size_t>(chooser_.vocab_size()) + 31) / 32;
        require(row.mask.empty() || row.mask.size() == words, "a mask does not fit the vocabulary");
    }
    void check_top(size_t rows, const Out2<int32_t>& ids, const Out2<float>& logprobs) const {
        require(ids.shape(0) == rows && logprobs.shape(0) == rows && ids.shape(1) == logprobs.shape(1) &&
                    ids.shape(1) <= static_cast<size_t>(chooser_.vocab_size()),
                "the arrays for the most probable tokens have the wrong shape");
    }

    const KernelTable& kernels_;
    Model model_;
    Chooser chooser_;
    std::shared_ptr<ThreadTeam> pool_;
};

}  // namespace kvarn
