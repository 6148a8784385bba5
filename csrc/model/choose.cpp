#include "choose.h"

#include <algorithm>
#include <cmath>

namespace kvarn {

namespace {

void fill(const Results& out, size_t row, int32_t id, double logprob, double entropy) {
    out.ids[row] = id;
    out.logprobs[row] = static_cast<float>(logprob);
    out.entropy[row] = static_cast<float>(entropy);
}

std::vector<HeadRow> picked(std::span<const HeadRow> rows, std::span<const size_t> at) {
    std::vector<HeadRow> found;
    for (size_t row : at) found.push_back(rows[row]);
    return found;
}

}  // namespace

void Chooser::sample(std::span<const HeadRow> rows, std::span<const RowSampling> params, bool want_logprobs,
                     const Results& out) {
    std::vector<size_t> greedy, whole;
    for (size_t row = 0; row < rows.size(); ++row) {
        fill(out, row, Sampler::kNoToken, 0, 0);
        if (is_finite(rows[row])) (params[row].is_greedy() ? greedy : whole).push_back(row);
    }
    if (!greedy.empty()) sample_greedy(rows, greedy, want_logprobs, out);
    if (!whole.empty()) sample_whole(rows, whole, params, want_logprobs, out);
}

void Chooser::sample_greedy(std::span<const HeadRow> rows, std::span<const size_t> at, bool want_logprobs,
                            const Results& out) {
    std::vector<Greedy> found(at.size());
    std::vector<Top> tops;
    for (size_t row : at) tops.push_back(out.top(row));
    greedy_.choose(picked(rows, at), want_logprobs, found, tops);
    for (size_t i = 0; i < at.size(); ++i) fill(out, at[i], found[i].id, found[i].logprob, found[i].softmax.entropy);
}

void Chooser::sample_whole(std::span<const HeadRow> rows, std::span<const size_t> at,
                           std::span<const RowSampling> params, bool want_logprobs, const Results& out) {
    head_.for_each_row(picked(rows, at), [&](size_t i, float* logits, int worker) {
        size_t row = at[i];
        Softmax softmax;
        std::vector<float>& plain = plain_[static_cast<size_t>(worker)];
        if (want_logprobs) {
            softmax = sampler_.softmax(logits);
            sampler_.most_probable(logits, softmax.log_total, out.top(row), worker);
            // The choice adjusts the row in place; log-probabilities are of the plain one.
            plain.assign(logits, logits + vocab_size());
        }
        int32_t id = sampler_.choose(params[row], logits, worker);
        bool has_logprob = want_logprobs && id != Sampler::kNoToken;
        double logprob = has_logprob ? static_cast<double>(plain[static_cast<size_t>(id)]) - softmax.log_total : 0;
        fill(out, row, id, logprob, softmax.entropy);
    });
}

void Chooser::score(std::span<const HeadRow> rows, std::span<const int32_t> targets, const Results& out) {
    head_.for_each_row(rows, [&](size_t row, float* logits, int worker) {
        double log_total = sampler_.softmax(logits).log_total;
        out.logprobs[row] = static_cast<float>(static_cast<double>(logits[targets[row]]) - log_total);
        sampler_.most_probable(logits, log_total, out.top(row), worker);
    });
}

void Chooser::logits(std::span<const HeadRow> rows, float* out) {
    size_t vocab = static_cast<size_t>(vocab_size());
    head_.for_each_row(rows, [&](size_t row, float* values, int) { std::copy_n(values, vocab, out + row * vocab); });
}

bool Chooser::is_finite(const HeadRow& row) const {
    auto finite = [&](const float* state) {
        return std::all_of(state, state + model_.spec().width, [](float x) { return std::isfinite(x); });
    };
    return finite(row.state) && (row.partner == nullptr || finite(row.partner));
}

}  // namespace kvarn
