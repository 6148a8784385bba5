#include "sample.h"

#include <algorithm>
#include <cmath>

#include "philox.h"

namespace kvarn {

namespace {

constexpr uint32_t kPurposeToken = 0, kPurposeXtc = 1;

double mass_of(float logit, float largest) {
    return std::exp(static_cast<double>(logit) - static_cast<double>(largest));
}

}  // namespace

Sampler::Sampler(const KernelTable& kernels, int vocab_size, int num_workers)
    : kernels_(kernels), vocab_size_(vocab_size), scratch_(static_cast<size_t>(num_workers)) {
    for (auto& candidates : scratch_) candidates.reserve(static_cast<size_t>(vocab_size));
}

void Sampler::forbid(std::span<const uint32_t> mask, float* logits) const {
    for (size_t word = 0; word < mask.size(); ++word) {
        if (mask[word] == ~0u) continue;
        int first = static_cast<int>(word) * 32, count = std::min(32, vocab_size_ - first);
        for (int i = 0; i < count; ++i)
            if (!(mask[word] >> i & 1)) logits[first + i] = -HUGE_VALF;
    }
}

void Sampler::adjust(const RowSampling& params, float* logits) const {
    for (size_t i = 0; i < params.bias_ids.size(); ++i) logits[params.bias_ids[i]] += params.bias_values[i];
    for (size_t i = 0; i < params.seen_ids.size(); ++i) {
        float& logit = logits[params.seen_ids[i]];
        if (params.repetition_penalty != 1.0f)
            logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
        int count = params.seen_counts[i];
        if (count > 0) logit -= params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
    }
}

namespace {
constexpr auto kMoreProbable = [](const auto& a, const auto& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
};
}  // namespace

// The k largest logits, sorted.
void Sampler::collect_top(const float* logits, int k, std::vector<Candidate>& out) const {
    out.clear();
    size_t keep = static_cast<size_t>(std::min(k, vocab_size_));
    if (keep == 0) return;
    // A bounded heap whose front is the least probable of the best so far.
    for (int i = 0; i < vocab_size_; ++i) {
        Candidate candidate{logits[i], i};
        if (out.size() < keep) {
            out.push_back(candidate);
            if (out.size() == keep) std::make_heap(out.begin(), out.end(), kMoreProbable);
        } else if (candidate.logit > out.front().logit) {
            std::pop_heap(out.begin(), out.end(), kMoreProbable);
            out.back() = candidate;
            std::push_heap(out.begin(), out.end(), kMoreProbable);
        }
    }
    std::sort(out.begin(), out.end(), kMoreProbable);
}

// The most probable candidates that together hold at least `mass` of sum exp(logit - largest), sorted. Found by
// lowering a threshold, because sorting a whole vocabulary costs more than the model's last layer.
void Sampler::collect_mass(const float* logits, float largest, double mass, std::vector<Candidate>& out) const {
    for (float depth = 4.0f;; depth *= 2.0f) {
        out.clear();
        double found = 0;
        bool is_everything = depth > 256.0f;
        for (int i = 0; i < vocab_size_; ++i) {
            if (!is_everything && logits[i] < largest - depth) continue;
            out.push_back({logits[i], i});
            found += mass_of(logits[i], largest);
        }
        if (is_everything || found >= mass) break;
    }
    std::sort(out.begin(), out.end(), kMoreProbable);
}

void Sampler::collect_above(const float* logits, float floor, std::vector<Candidate>& out) const {
    out.clear();
    for (int i = 0; i < vocab_size_; ++i)
        if (logits[i] >= floor) out.push_back({logits[i], i});
    std::sort(out.begin(), out.end(), kMoreProbable);
}

double Sampler::total_mass(const std::vector<Candidate>& candidates, float largest) {
    double total = 0;
    for (const Candidate& c : candidates) total += mass_of(c.logit, largest);
    return total;
}

// Length of the shortest non-empty prefix with at least this mass; all of it when there is none.
size_t Sampler::prefix_with_mass(const std::vector<Candidate>& candidates, float largest, double mass) {
    double walked = 0;
    for (size_t i = 0; i < candidates.size(); ++i)
        if ((walked += mass_of(candidates[i].logit, largest)) >= mass) return i + 1;
    return candidates.size();
}

void Sampler::keep_typical(double typical_p, float largest, std::vector<Candidate>& candidates) {
    double total = 0, weighted = 0;
    for (const Candidate& c : candidates) {
        double mass = mass_of(c.logit, largest);
        if (mass == 0.0) continue;  // 0 * -inf is not 0
        total += mass;
        weighted += mass * (static_cast<double>(c.logit) - static_cast<double>(largest));
    }
    double log_total = std::log(total), entropy = log_total - weighted / total;
    auto surprise = [&](const Candidate& c) {
        return std::abs(log_total - (static_cast<double>(c.logit) - static_cast<double>(largest)) - entropy);
    };
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](const Candidate& a, const Candidate& b) { return surprise(a) < surprise(b); });
    candidates.resize(prefix_with_mass(candidates, largest, typical_p * total));
    std::sort(candidates.begin(), candidates.end(), kMoreProbable);
}

// XTC: drop all candidates of at least this mass but the least probable of them; return the mass that went.
double Sampler::drop_top(double floor, float largest, std::vector<Candidate>& candidates) {
    size_t above = 0;
    while (above < candidates.size() && mass_of(candidates[above].logit, largest) >= floor) ++above;
    if (above < 2) return 0;
    double dropped = 0;
    for (size_t i = 0; i + 1 < above; ++i) dropped += mass_of(candidates[i].logit, largest);
    candidates.erase(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(above - 1));
    return dropped;
}

// How much of the mass, most probable first, the walk can need when no other filter is on.
double Sampler::reachable_mass(const RowSampling& params, const float* logits, float largest, double u, double total,
                               bool drops_top) const {
    if (!drops_top) return u * total;
    double floor = static_cast<double>(params.xtc_threshold) * total, dropped = 0;
    for (int i = 0; i < vocab_size_; ++i)
        if (double mass = mass_of(logits[i], largest); mass >= floor) dropped += mass;
    // A little more than all above the floor: there may be nothing else, and the last of them stays.
    return dropped + u * std::max(0.0, total - dropped) + 1e-9 * total;
}

// Sorted candidates and the mass of the set they stand for. A tail that no filter of this choice could keep, or that
// the walk cannot reach, is left out of the list but counted in the mass.
double Sampler::collect(const RowSampling& params, const float* logits, float largest, double u, bool drops_top,
                        std::vector<Candidate>& out) const {
    if (params.top_k > 0) {
        collect_top(logits, params.top_k, out);
        return total_mass(out, largest);
    }
    double total = kernels_.sum_exp(logits, vocab_size_, largest);
    if (params.typical_p < 1.0f) collect_mass(logits, largest, HUGE_VAL, out);
    else if (params.top_p < 1.0f) collect_mass(logits, largest, static_cast<double>(params.top_p) * total, out);
    else if (params.min_p > 0.0f) collect_above(logits, largest + std::log(params.min_p) - 1e-3f, out);
    else collect_mass(logits, largest, reachable_mass(params, logits, largest, u, total, drops_top), out);
    return total;
}

int32_t Sampler::choose(const RowSampling& params, float* logits, int worker) {
    forbid(params.mask, logits);
    adjust(params, logits);
    int best = 0;
    float largest = 0;
    kernels_.argmax(logits, vocab_size_, &best, &largest);
    if (!std::isfinite(largest)) return kNoToken;
    largest /= params.temperature;
    // So cold that the scaled logits overflow: the choice is greedy.
    if (params.temperature == 0.0f || !std::isfinite(largest)) return best;
    for (int i = 0; i < vocab_size_; ++i) logits[i] /= params.temperature;

    double u = uniform(params.seed, params.position, params.choice, kPurposeToken, params.draw);
    bool drops_top = params.xtc_probability > 0.0f &&
                     uniform(params.seed, params.position, params.choice, kPurposeXtc, params.draw) <
                         static_cast<double>(params.xtc_probability);
    std::vector<Candidate>& candidates = scratch_[static_cast<size_t>(worker)];
    double total = collect(params, logits, largest, u, drops_top, candidates);
    if (!params.mask.empty())
        while (candidates.back().logit == -HUGE_VALF) candidates.pop_back();  // the largest is finite and stays
    if (params.typical_p < 1.0f) {
        keep_typical(static_cast<double>(params.typical_p), largest, candidates);
        total = total_mass(candidates, largest);
    }
    if (params.top_p < 1.0f) {
        candidates.resize(prefix_with_mass(candidates, largest, static_cast<double>(params.top_p) * total));
        total = total_mass(candidates, largest);
    }
    if (params.min_p > 0.0f) {
        double floor = static_cast<double>(params.min_p) * mass_of(candidates.front().logit, largest);
        while (mass_of(candidates.back().logit, largest) < floor) candidates.pop_back();
        total = total_mass(candidates, largest);
    }
    if (drops_top) total -= drop_top(static_cast<double>(params.xtc_threshold) * total, largest, candidates);
    return candidates[prefix_with_mass(candidates, largest, u * total) - 1].id;
}

Softmax Sampler::softmax(const float* logits) const {
    std::vector<SoftmaxPiece> pieces;
    for (int first = 0; first < vocab_size_; first += kVocabPiece) {
        int n = std::min(kVocabPiece, vocab_size_ - first), best = 0;
        SoftmaxPiece& piece = pieces.emplace_back();
        kernels_.argmax(logits + first, n, &best, &piece.largest);
        kernels_.softmax_sums(logits + first, n, piece.largest, piece.sums);
    }
    return merge_pieces(static_cast<int>(pieces.size()),
                        [&](int i) -> const SoftmaxPiece& { return pieces[static_cast<size_t>(i)]; });
}

void Sampler::most_probable(const float* logits, double log_total, const Top& top, int worker) {
    std::vector<Candidate>& candidates = scratch_[static_cast<size_t>(worker)];
    collect_top(logits, top.count, candidates);
    for (size_t i = 0; i < candidates.size(); ++i) {
        top.ids[i] = candidates[i].id;
        top.logprobs[i] = static_cast<float>(static_cast<double>(candidates[i].logit) - log_total);
    }
}

}  // namespace kvarn
