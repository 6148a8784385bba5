#include "states.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvarn {

namespace {

constexpr float kUnitEps = 1e-6f;

size_t offset(int row, int columns) { return static_cast<size_t>(row) * static_cast<size_t>(columns); }

// One layer of one step: where each sequence finds its state and leaves it.
class Layer {
public:
    Layer(const Compute& compute, const LayerPlan& plan, const StateStore& store, size_t index, const BatchView& batch,
          const StepBuffers& buffers)
        : kernels_(compute.kernels), plan_(plan), spec_(plan.recurrent), store_(store), index_(index), batch_(batch),
          buffers_(buffers) {}

    // Null: zeros.
    const float* begin_of(int sequence) const {
        const bool has_one = batch_.state_read != nullptr && batch_.state_read[sequence] >= 0;
        return has_one ? store_.at(batch_.state_read[sequence], index_) : nullptr;
    }

    // Call body(state) with every place that the state behind a row goes to.
    template <class Body>
    void for_targets(int sequence, int row, Body body) const {
        if (batch_.state_written == nullptr) return;
        if (row + 1 == batch_.row_starts[sequence + 1]) body(store_.at(batch_.state_written[sequence], index_));
        const auto begin = batch_.saved_states.begin(), end = batch_.saved_states.end();
        const auto saved = std::lower_bound(begin, end, std::pair(row, 0));
        if (saved != end && saved->first == row) body(store_.at(saved->second, index_));
    }

    // What the convolution reads of the row `back` rows before this one; zeros before the first.
    const float* input(int sequence, int row, int back, const float* zeros) const {
        const int first = batch_.row_starts[sequence], at = row - back;
        if (at >= first) return buffers_.q + offset(at, spec_.input_width());
        const float* state = begin_of(sequence);
        return state == nullptr ? zeros : state + offset(spec_.kernel - 1 - (first - at), spec_.channels());
    }

    // (1) b * v of a short convolution.
    void mix_input(int row) const {
        float* x = buffers_.q + offset(row, spec_.input_width());
        const int width = spec_.conv_width;
        for (int i = 0; i < width; ++i) x[i] *= x[2 * width + i];
    }

    // (2) The convolution of a row; Q and K of a delta net become unit vectors.
    void convolve(int sequence, int row, const float* zeros) const {
        const float* rows[kMaxConvKernel];
        for (int i = 0; i < spec_.kernel; ++i) rows[i] = input(sequence, row, spec_.kernel - 1 - i, zeros);
        const bool is_short = spec_.is_short_conv();
        float* y = is_short ? buffers_.mixed + offset(row, spec_.conv_width)
                            : buffers_.convolved + offset(row, spec_.channels());
        kernels_.convolve(rows, plan_.conv, spec_.kernel, spec_.channels(), !is_short, y);
        if (is_short) {
            const float* c = buffers_.q + offset(row, spec_.input_width()) + spec_.conv_width;
            for (int i = 0; i < spec_.conv_width; ++i) y[i] *= c[i];
            return;
        }
        const float eps = kUnitEps / static_cast<float>(spec_.key_dim);
        for (int h = 0; h < 2 * spec_.num_key_heads; ++h) {
            const std::vector<float>& unit = h < spec_.num_key_heads ? plan_.query_unit : plan_.key_unit;
            kernels_.rms_norm(y + offset(h, spec_.key_dim), unit.data(), eps, spec_.key_dim,
                              y + offset(h, spec_.key_dim));
        }
        set_rates(row);
    }

    // (3) What the convolution reads next, behind those rows of a sequence whose state is kept.
    void keep_inputs(int sequence, const float* zeros) const {
        for (int row = batch_.row_starts[sequence]; row < batch_.row_starts[sequence + 1]; ++row)
            for_targets(sequence, row, [&](float* state) {
                // A slot that is written is never one that is read.
                for (int i = 0; i < spec_.kernel - 1; ++i)
                    std::memcpy(state + offset(i, spec_.channels()), input(sequence, row, spec_.kernel - 2 - i, zeros),
                                static_cast<size_t>(spec_.channels()) * sizeof(float));
            });
    }

    // (4) One head of a delta net through all rows of a sequence; work holds its state.
    void scan_head(int sequence, int head, float* work) const {
        const size_t size = spec_.head_floats(), at = spec_.conv_floats() + static_cast<size_t>(head) * size;
        const int key_head = spec_.key_head(head), keys = spec_.keys();
        const float* state = begin_of(sequence);
        if (state == nullptr) std::fill_n(work, size, 0.0f);
        const float* from = state == nullptr ? work : state + at;
        for (int row = batch_.row_starts[sequence]; row < batch_.row_starts[sequence + 1]; ++row) {
            const float* x = buffers_.convolved + offset(row, spec_.channels());
            const size_t rate = offset(row, spec_.num_value_heads) + static_cast<size_t>(head);
            kernels_.delta_step(from, x + offset(key_head, spec_.key_dim), x + keys + offset(key_head, spec_.key_dim),
                                x + 2 * keys + offset(head, spec_.value_dim), buffers_.decay[rate], buffers_.beta[rate],
                                spec_.key_dim, spec_.value_dim, work,
                                buffers_.mixed + offset(row, spec_.values()) + offset(head, spec_.value_dim));
            from = work;
            for_targets(sequence, row, [&](float* target) { std::memcpy(target + at, work, size * sizeof(float)); });
        }
    }

    // (5) Norm and gate of a row.
    void finish(int row) const {
        float* y = buffers_.mixed + offset(row, spec_.values());
        for (int h = 0; h < spec_.num_value_heads; ++h) {
            float* head = y + offset(h, spec_.value_dim);
            plan_.state_norm.apply(kernels_, head, spec_.value_dim, head);
        }
        kernels_.silu_mul(buffers_.output_gate + offset(row, spec_.values()), y, spec_.values(), y);
    }

private:
    void set_rates(int row) const {
        for (int h = 0; h < spec_.num_value_heads; ++h) {
            const size_t at = offset(row, spec_.num_value_heads) + static_cast<size_t>(h);
            const double x = static_cast<double>(buffers_.decay[at]) + static_cast<double>(plan_.dt[h]);
            const double softplus = x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
            buffers_.decay[at] = static_cast<float>(std::exp(static_cast<double>(plan_.a[h]) * softplus));
            buffers_.beta[at] = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(buffers_.beta[at]))));
        }
    }

    const KernelTable& kernels_;
    const LayerPlan& plan_;
    const RecurrentSpec& spec_;
    const StateStore& store_;
    size_t index_;
    const BatchView& batch_;
    const StepBuffers& buffers_;
};

}  // namespace

void StateStore::reserve(const std::vector<size_t>& floats, int num_slots) {
    offsets_.clear();
    size_t bytes = 0;
    for (size_t count : floats) {
        offsets_.push_back(bytes);
        bytes += Arena::padded(count * sizeof(float));
    }
    slot_bytes_ = bytes;
    num_slots_ = num_slots;
    region_ = PageRegion(bytes * static_cast<size_t>(num_slots), true);
}

void run_recurrent(const Compute& compute, const LayerPlan& layer, const StateStore& store, size_t index,
                   const BatchView& batch, const StepBuffers& buffers, const Activations& out) {
    const Layer step(compute, layer, store, index, batch, buffers);
    const RecurrentSpec& spec = layer.recurrent;
    const std::vector<float> zeros(static_cast<size_t>(spec.channels()));
    const int n = batch.num_tokens, heads = spec.num_value_heads;
    if (spec.is_short_conv()) for_rows(compute, n, [&](int row) { step.mix_input(row); });
    for_rows(compute, n, [&](int row) { step.convolve(batch.sequence_of(row), row, zeros.data()); });
    compute.pool.run(batch.num_sequences * (heads + 1), [&](int task, int worker) {
        const int sequence = task / (heads + 1), head = task % (heads + 1);
        if (head == heads) step.keep_inputs(sequence, zeros.data());
        else step.scan_head(sequence, head, buffers.state_work + static_cast<size_t>(worker) * spec.head_floats());
    });
    for_rows(compute, n, [&](int row) {
        if (!spec.is_short_conv()) step.finish(row);
        out.quantize(compute.kernels, row, 0, spec.values());
    });
}

}  // namespace kvarn
