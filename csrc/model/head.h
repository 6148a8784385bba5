// The language-model head: rows of hidden states to logits, a bounded number of them at a time.
#pragma once
#include <cmath>
#include <span>
#include <utility>

#include "forward.h"

namespace kvarn {

// One wanted row of logits. With a partner, whose state is the unconditional one, they are Lu + guidance * (L - Lu).
struct HeadRow {
    const float* state;  // (width)
    const float* partner = nullptr;
    float guidance = 1;
    std::span<const int32_t> bias_ids = {};  // added before a token is chosen, by whoever chooses
    std::span<const float> bias_values = {};
    const AdapterUses* adapters = nullptr;  // null: none

    int num_states() const { return partner == nullptr ? 1 : 2; }
};

// How many rows from `first` on need at most max_states states; at least one.
int rows_of_pass(std::span<const HeadRow> rows, size_t first, int max_states);
// Copy their states, partners behind their rows, and return how many there are.
int gather_states(std::span<const HeadRow> rows, int width, float* out);
// What their adapters add to the logits of those states; empty where none does.
void adapt_head(const Model& model, std::span<const HeadRow> rows, const float* states, LowRankRows& found);
// logits += guidance towards them and away from the partner's
void guide(float* logits, const float* partner, float guidance, int n);
// Bias, scale and cap of the logits of tokens [first, first + n).
void finish_logits(const Model& model, int first, int n, float* logits);

class Head {
public:
    explicit Head(Model& model) : model_(model) {}

    // Call use(row, logits, worker) for every row. `logits` may be changed in place and is gone after the call. Rows
    // are used in parallel. Rows that were in memory together, none of them with a partner, are all there once more for
    // after(first row, how many, what use() left of their logits).
    template <class Use, class After>
    void for_each_row(std::span<const HeadRow> rows, Use&& use, After&& after) {
        std::lock_guard turn(model_.compute().pool.turn());
        for (size_t first = 0; first < rows.size();) {
            int count = rows_of_pass(rows, first, states_per_pass());
            std::span<const HeadRow> pass = rows.subspan(first, static_cast<size_t>(count));
            project_rows(pass);
            model_.compute().pool.run(
                count, [&](int i, int worker) { use(first + static_cast<size_t>(i), row(pass, i), worker); });
            after(first, count, static_cast<const float*>(logits_));
            first += static_cast<size_t>(count);
        }
    }
    template <class Use>
    void for_each_row(std::span<const HeadRow> rows, Use&& use) {
        for_each_row(rows, std::forward<Use>(use), [](size_t, int, const float*) {});
    }

    int vocab_size() const { return model_.spec().vocab_size; }
    size_t logit_bytes() const { return logit_bytes_; }  // the most that were alive at once

private:
    int states_per_pass() const;
    void project_rows(std::span<const HeadRow> rows);
    float* row(std::span<const HeadRow> rows, int i);

    Model& model_;
    Arena arena_;
    float* logits_ = nullptr;
    LowRankRows low_rank_;
    size_t logit_bytes_ = 0;
};

}  // namespace kvarn
