#include "head.h"

#include <algorithm>

namespace kvarn {

namespace {
constexpr size_t kLogitBytes = 20 << 20;  // of logits alive at once: 32 rows of 150,000
}

int rows_of_pass(std::span<const HeadRow> rows, size_t first, int max_states) {
    int count = 0, states = 0;
    for (size_t i = first; i < rows.size(); ++i) {
        states += rows[i].num_states();
        if (count > 0 && states > max_states) break;
        ++count;
    }
    return count;
}

int gather_states(std::span<const HeadRow> rows, int width, float* out) {
    int count = 0;
    auto add = [&](const float* state) {
        std::copy_n(state, width, out + static_cast<size_t>(count) * static_cast<size_t>(width));
        ++count;
    };
    for (const HeadRow& row : rows) {
        add(row.state);
        if (row.partner != nullptr) add(row.partner);
    }
    return count;
}

void adapt_head(const Model& model, std::span<const HeadRow> rows, const float* states, LowRankRows& found) {
    int count = 0;
    for (const HeadRow& row : rows) count += row.num_states();
    found.begin(count);
    int first = 0;
    for (const HeadRow& row : rows) {
        for (int state = 0; row.adapters != nullptr && state < row.num_states(); ++state)
            for (const AdapterUse& use : *row.adapters)
                if (use.adapter->head.a.packed != nullptr) found.add(first + state, use.adapter->head, use.scale);
        first += row.num_states();
    }
    if (!found.empty()) found.multiply(model.compute(), states, model.spec().width);
}

void guide(float* logits, const float* partner, float guidance, int n) {
    for (int i = 0; i < n; ++i) logits[i] = partner[i] + guidance * (logits[i] - partner[i]);
}

void finish_logits(const Model& model, int first, int n, float* logits) {
    const float scale = model.spec().head_scale, cap = model.spec().head_softcap;
    if (const float* bias = model.plan().head_bias) model.compute().kernels.add(bias + first, n, logits);
    if (scale != 1.0f)
        for (int i = 0; i < n; ++i) logits[i] *= scale;
    if (cap != 0.0f)
        for (int i = 0; i < n; ++i) logits[i] = cap * std::tanh(logits[i] / cap);
}

int Head::states_per_pass() const {
    size_t rows = kLogitBytes / (static_cast<size_t>(vocab_size()) * sizeof(float));
    return std::clamp(static_cast<int>(rows), 1, kTileTokens);
}

void Head::project_rows(std::span<const HeadRow> rows) {
    int width = model_.spec().width, n = 0;
    for (const HeadRow& row : rows) n += row.num_states();
    size_t vocab = static_cast<size_t>(vocab_size()), count = static_cast<size_t>(n);
    size_t states = count * static_cast<size_t>(width);
    arena_.reserve(QuantBuffers::arena_bytes(model_.compute().kernels, n, width) +
                   Arena::padded(states * sizeof(float)) + Arena::padded(count * vocab * sizeof(float)) + 256);
    QuantBuffers buffers = QuantBuffers::take(arena_, model_.compute().kernels, n, width);
    float* values = arena_.take<float>(states);
    logits_ = arena_.take<float>(count * vocab);
    logit_bytes_ = std::max(logit_bytes_, count * vocab * sizeof(float));
    gather_states(rows, width, values);
    Projection head{model_.plan().head, logits_, vocab, nullptr};
    Compute compute = model_.compute();
    adapt_head(model_, rows, values, low_rank_);
    if (!low_rank_.empty()) head.low_rank = &low_rank_;
    project(compute, prepare(compute, buffers, values, n, width, {&head, 1}), {&head, 1},
            [&](size_t, Tokens tokens, int begin, int end) {
                for (int row = tokens.begin; row < tokens.end; ++row)
                    finish_logits(model_, begin, end - begin,
                                  logits_ + static_cast<size_t>(row) * vocab + static_cast<size_t>(begin));
            });
}

float* Head::row(std::span<const HeadRow> rows, int i) {
    size_t vocab = static_cast<size_t>(vocab_size()), index = 0;
    for (const HeadRow& before : rows.first(static_cast<size_t>(i))) index += static_cast<size_t>(before.num_states());
    float* logits = logits_ + index * vocab;
    const HeadRow& wanted = rows[static_cast<size_t>(i)];
    if (wanted.partner != nullptr) guide(logits, logits + vocab, wanted.guidance, vocab_size());
    return logits;
}

}  // namespace kvarn
