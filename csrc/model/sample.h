// The choice of a token from a row of logits. sampling/sampler.py is the readable definition of the choice.
#pragma once
#include <span>
#include <vector>

#include "softmax.h"

namespace kvarn {

// RowSampling of backends/batch.py.
struct RowSampling {
    float temperature = 0, top_p = 1, min_p = 0, typical_p = 1;
    float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
    float xtc_probability = 0, xtc_threshold = 0.1f;
    int top_k = 0;
    uint64_t seed = 0;
    uint32_t choice = 0, position = 0, draw = 0;
    float cfg_scale = 0;
    std::span<const int32_t> bias_ids, seen_ids, seen_counts;
    std::span<const float> bias_values;
    std::span<const uint32_t> mask;  // bit i % 32 of word i / 32: token i may be chosen; empty: all may

    // Whether it takes the largest of the logits and biases.
    bool is_greedy() const { return temperature == 0.0f && seen_ids.empty() && mask.empty(); }
};

struct Top {
    int32_t* ids;
    float* logprobs;
    int count;
};

// Chooses tokens from rows of logits; owns the candidate lists of each worker, so that no step allocates.
class Sampler {
public:
    Sampler(const KernelTable& kernels, int vocab_size, int num_workers);

    static constexpr int32_t kNoToken = -1;

    // Changes logits in place. kNoToken when the logits are not finite or the mask has no bit.
    int32_t choose(const RowSampling& params, float* logits, int worker);

    Softmax softmax(const float* logits) const;
    void most_probable(const float* logits, double log_total, const Top& top, int worker);

private:
    struct Candidate {
        float logit;
        int32_t id;
    };

    void forbid(std::span<const uint32_t> mask, float* logits) const;
    void adjust(const RowSampling& params, float* logits) const;
    void collect_top(const float* logits, int k, std::vector<Candidate>& out) const;
    void collect_mass(const float* logits, float largest, double mass, std::vector<Candidate>& out) const;
    void collect_above(const float* logits, float floor, std::vector<Candidate>& out) const;
    double collect(const RowSampling& params, const float* logits, float largest, double u, bool drops_top,
                   std::vector<Candidate>& out) const;
    double reachable_mass(const RowSampling& params, const float* logits, float largest, double u, double total,
                          bool drops_top) const;
    static double total_mass(const std::vector<Candidate>& candidates, float largest);
    static size_t prefix_with_mass(const std::vector<Candidate>& candidates, float largest, double mass);
    static double drop_top(double floor, float largest, std::vector<Candidate>& candidates);
    static void keep_typical(double typical_p, float largest, std::vector<Candidate>& candidates);

    const KernelTable& kernels_;
    int vocab_size_;
    std::vector<std::vector<Candidate>> scratch_;
};

}  // namespace kvarn
