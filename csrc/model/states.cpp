#include "states.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvarn {

namespace {

constexpr float kUnitEps = 1e-6f;
constexpr size_t kSlotPage = 4096;  // slots are whole pages, so that they can be given back one by one

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
        if (at >= first) return buffers_.q + offset(at, spec_.input_width()) + spec_.conv_offset();
        const float* state = begin_of(sequence);
        return state == nullptr ? zeros : state + offset(spec_.kernel - 1 - (first - at), spec_.channels());
    }

    // (1) b * v of a short convolution.
    void mix_input(int row) const {
        float* x = buffers_.q + offset(row, spec_.input_width());
        const int width = spec_.conv_width;
        for (int i = 0; i < width; ++i) x[i] *= x[2 * width + i];
    }

    // (2) The convolution of a row, and what follows from the row alone.
    void convolve(int sequence, int row, const float* zeros) const {
        const float* rows[kMaxConvKernel];
        for (int i = 0; i < spec_.kernel; ++i) rows[i] = input(sequence, row, spec_.kernel - 1 - i, zeros);
        const bool is_short = spec_.is(RecurrentKind::short_conv);
        float* y = is_short ? buffers_.mixed + offset(row, spec_.conv_width)
                            : buffers_.convolved + offset(row, spec_.channels());
        kernels_.convolve(rows, plan_.conv, plan_.conv_bias, spec_.kernel, spec_.channels(), !is_short, y);
        if (is_short) gate_short(row, y);
        if (spec_.is(RecurrentKind::delta_net)) make_units(row, y);
        if (spec_.is(RecurrentKind::state_space)) set_steps(row);
    }

    void gate_short(int row, float* y) const {
        const float* c = buffers_.q + offset(row, spec_.input_width()) + spec_.conv_width;
        for (int i = 0; i < spec_.conv_width; ++i) y[i] *= c[i];
    }

    // Q and K of a delta net.
    void make_units(int row, float* y) const {
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

    // (4) One head through all rows of a sequence; work holds its state.
    void scan_head(int sequence, int head, float* work) const {
        const size_t at = spec_.conv_floats() + static_cast<size_t>(head) * spec_.head_floats();
        const size_t size = static_cast<size_t>(spec_.key_dim) * static_cast<size_t>(spec_.head_columns(head));
        const float* state = begin_of(sequence);
        if (state == nullptr) std::fill_n(work, size, 0.0f);
        const float* from = state == nullptr ? work : state + at;
        for (int row = batch_.row_starts[sequence]; row < batch_.row_starts[sequence + 1]; ++row) {
            step_head(row, head, from, work);
            from = work;
            for_targets(sequence, row, [&](float* target) { std::memcpy(target + at, work, size * sizeof(float)); });
        }
    }

    // (5) Norm and gate of a row.
    void finish(int row) const {
        float* y = buffers_.mixed + offset(row, spec_.values());
        if (spec_.is(RecurrentKind::state_space)) return finish_state_space(row, y);
        if (spec_.is(RecurrentKind::selective)) return finish_selective(row, y);
        for (int h = 0; h < spec_.num_value_heads; ++h) {
            float* head = y + offset(h, spec_.value_dim);
            plan_.state_norm.apply(kernels_, head, spec_.value_dim, head);
        }
        kernels_.silu_mul(buffers_.output_gate + offset(row, spec_.values()), y, spec_.values(), y);
    }

    // Of a selective layer: what its steps are made of, each part divided by its rms where the model does so.
    void cut_ranks(int row) const {
        float* parts = buffers_.parameters + offset(row, spec_.parameters());
        const float* unit = plan_.parameter_unit.data();
        for (auto [begin, n] : {std::pair(0, spec_.rank), std::pair(spec_.rank, spec_.key_dim),
                                std::pair(spec_.rank + spec_.key_dim, spec_.key_dim)})
            if (spec_.has_parameter_norm)
                kernels_.rms_norm(parts + begin, unit, spec_.parameter_norm_eps, n, parts + begin);
        std::copy_n(parts, spec_.rank, buffers_.ranks + offset(row, spec_.rank));
    }

private:
    static float softplus(double x) {
        return static_cast<float>(x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)));
    }

    void step_head(int row, int head, const float* from, float* work) const {
        const float* x = buffers_.convolved + offset(row, spec_.channels());
        const size_t rate = offset(row, spec_.num_value_heads) + static_cast<size_t>(head);
        const size_t column = offset(head, spec_.value_dim);
        const int key_dim = spec_.key_dim, value_dim = spec_.head_columns(head), keys = spec_.keys();
        float* out = buffers_.mixed + offset(row, spec_.values()) + column;
        if (spec_.is(RecurrentKind::selective)) {
            const float* b = buffers_.parameters + offset(row, spec_.parameters()) + spec_.rank;
            float* steps = buffers_.steps + offset(row, spec_.values()) + column;
            for (int i = 0; i < value_dim; ++i) steps[i] = softplus(static_cast<double>(steps[i]));
            const float* decays = plan_.decays.data() + static_cast<size_t>(head) * spec_.head_floats();
            kernels_.selective_step(from, decays, b + key_dim, b, x + column, steps, key_dim, value_dim, work, out);
            return;
        }
        const size_t key = offset(spec_.key_head(head), key_dim);
        if (spec_.is(RecurrentKind::state_space)) {
            const float* b = x + spec_.values() + key;
            kernels_.state_step(from, b + keys, b, x + column, buffers_.decay[rate], buffers_.beta[rate], key_dim,
                                value_dim, work, out);
            return;
        }
        kernels_.delta_step(from, x + key, x + keys + key, x + 2 * keys + column, buffers_.decay[rate],
                            buffers_.beta[rate], key_dim, value_dim, work, out);
    }

    void set_steps(int row) const {
        const float* dt = buffers_.q + offset(row + 1, spec_.input_width()) - spec_.num_value_heads;
        for (int h = 0; h < spec_.num_value_heads; ++h) {
            const size_t at = offset(row, spec_.num_value_heads) + static_cast<size_t>(h);
            const float step = softplus(static_cast<double>(dt[h]) + static_cast<double>(plan_.dt[h]));
            buffers_.beta[at] = std::clamp(step, spec_.min_step, spec_.max_step);
            const double power = static_cast<double>(plan_.a[h]) * static_cast<double>(buffers_.beta[at]);
            buffers_.decay[at] = static_cast<float>(std::exp(power));
        }
    }

    void finish_state_space(int row, float* y) const {
        const float* v = buffers_.convolved + offset(row, spec_.channels());
        const float* z = buffers_.q + offset(row, spec_.input_width());
        for (int i = 0; i < spec_.values(); ++i) y[i] += plan_.d[i / spec_.value_dim] * v[i];
        if (!spec_.is_norm_first) kernels_.silu_mul(z, y, spec_.values(), y);
        const int size = spec_.values() / spec_.num_key_heads;
        for (int g = 0; spec_.norm && g < spec_.num_key_heads; ++g) {
            const size_t at = offset(g, size);
            kernels_.rms_norm(y + at, plan_.state_norm.weight + at, plan_.state_norm.eps, size, y + at);
        }
        if (spec_.is_norm_first) kernels_.silu_mul(z, y, spec_.values(), y);
    }

    void finish_selective(int row, float* y) const {
        const float* v = buffers_.convolved + offset(row, spec_.channels());
        const float* z = buffers_.q + offset(row, spec_.input_width()) + spec_.values();
        for (int i = 0; i < spec_.values(); ++i) y[i] += plan_.d[i] * v[i];
        kernels_.silu_mul(z, y, spec_.values(), y);
    }

    void set_rates(int row) const {
        for (int h = 0; h < spec_.num_value_heads; ++h) {
            const size_t at = offset(row, spec_.num_value_heads) + static_cast<size_t>(h);
            const double x = static_cast<double>(buffers_.decay[at]) + static_cast<double>(plan_.dt[h]);
            const double rate = x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
            buffers_.decay[at] = static_cast<float>(std::exp(static_cast<double>(plan_.a[h]) * rate));
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

// B, C and the steps of a selective layer's rows, made of what its convolution gave.
void project_steps(const Compute& compute, const LayerPlan& plan, const Layer& layer, int n,
                   const StepBuffers& buffers) {
    const RecurrentSpec& spec = plan.recurrent;
    Projection parameters{plan.parameters, buffers.parameters, static_cast<size_t>(spec.parameters()), nullptr};
    project(compute, prepare(compute, buffers.quants, buffers.convolved, n, spec.values(), {&parameters, 1}),
            {&parameters, 1});
    for_rows(compute, n, [&](int row) { layer.cut_ranks(row); });
    Projection steps{plan.steps, buffers.steps, static_cast<size_t>(spec.values()), plan.steps_bias};
    project(compute, prepare(compute, buffers.quants, buffers.ranks, n, spec.rank, {&steps, 1}), {&steps, 1});
}

}  // namespace

void StateStore::reserve(const std::vector<size_t>& floats, int num_slots) {
    offsets_.clear();
    size_t bytes = 0;
    for (size_t count : floats) {
        offsets_.push_back(bytes);
        bytes += Arena::padded(count * sizeof(float));
    }
    slot_bytes_ = (bytes + kSlotPage - 1) / kSlotPage * kSlotPage;
    num_slots_ = num_slots;
    region_ = PageRegion(slot_bytes_ * static_cast<size_t>(num_slots), true);
}

void run_recurrent(const Compute& compute, const LayerPlan& layer, const StateStore& store, size_t index,
                   const BatchView& batch, const StepBuffers& buffers, const Activations& out) {
    const Layer step(compute, layer, store, index, batch, buffers);
    const RecurrentSpec& spec = layer.recurrent;
    const std::vector<float> zeros(static_cast<size_t>(spec.channels()));
    const int n = batch.num_tokens, heads = spec.num_value_heads;
    const bool is_short = spec.is(RecurrentKind::short_conv);
    if (is_short) for_rows(compute, n, [&](int row) { step.mix_input(row); });
    for_rows(compute, n, [&](int row) { step.convolve(batch.sequence_of(row), row, zeros.data()); });
    if (spec.is(RecurrentKind::selective)) project_steps(compute, layer, step, n, buffers);
    compute.pool.run(batch.num_sequences * (heads + 1), [&](int task, int worker) {
        const int sequence = task / (heads + 1), head = task % (heads + 1);
        if (head == heads) step.keep_inputs(sequence, zeros.data());
        else step.scan_head(sequence, head, buffers.state_work + static_cast<size_t>(worker) * spec.head_floats());
    });
    for_rows(compute, n, [&](int row) {
        if (!is_short) step.finish(row);
        out.quantize(compute.kernels, row, 0, spec.values());
    });
}

}  // namespace kvarn
