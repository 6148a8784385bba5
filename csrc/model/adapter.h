// LoRA adapters: low-rank pairs beside the matrices of a model, and what the rows of a step add by them.
//
// Every row is computed on its own, in the order of its request's adapters: who shares the batch changes no bit.
#pragma once
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "weights.h"

namespace kvarn {

struct Activations;
struct Compute;
struct Projection;

// out += scale * b (a x); both are packed as matrices are, as f16 or f32.
struct LowRankPair {
    Matrix a, b;  // (rank, columns), (rows, rank); of the embedding a is (tokens, rank)
    float scale = 1;

    int rank() const { return b.columns; }
};

// The pairs of one adapter. Complete before a batch names it, and never changed afterwards.
class Adapter {
public:
    // base: whose matrices it changes.
    Adapter(size_t bytes, const Weights* base) : base_(base), region_(bytes, true) {}

    // Pack a row-major matrix of f16 or f32 values.
    Matrix pack(Type type, int rows, int columns, std::span<const uint8_t> source);
    void add(const Matrix* weight, const LowRankPair& pair) { pairs_[weight] = pair; }

    const LowRankPair* of(const Matrix* weight) const {
        auto found = pairs_.find(weight);
        return found == pairs_.end() ? nullptr : &found->second;
    }
    // Apart from the others: a tied head is the embedding's matrix, but not its pair.
    LowRankPair embedding, head;
    size_t bytes() const { return used_; }
    const Weights* base() const { return base_; }

private:
    const Weights* base_;
    PageRegion region_;
    size_t used_ = 0;
    std::unordered_map<const Matrix*, LowRankPair> pairs_;
};

struct AdapterUse {
    std::shared_ptr<const Adapter> adapter;
    float scale;
};
using AdapterUses = std::vector<AdapterUse>;

// What rows add to one product: low = scale * a x is known, b low is still to be added.
class LowRankRows {
public:
    // Begin anew with so many rows of `columns` values.
    void begin(int num_rows);
    void add(int row, const LowRankPair& pair, float scale);
    bool empty() const { return terms_.empty(); }
    // Compute low of every row, of values (rows, columns).
    void multiply(const Compute& compute, const float* values, int columns);
    // Add `rows` rows of b low, from group `group` on, to out.
    void add_to(const KernelTable& kernels, int row, int group, int rows, float* out) const;

private:
    struct Term {
        const LowRankPair* pair;
        float scale;
        size_t low;
        int next;  // of the same row, -1: none
    };

    std::vector<int> first_, last_;  // by row, -1: none
    std::vector<Term> terms_;
    std::vector<float> low_;
};

// The adapters of one step, by row.
class AdapterStep {
public:
    // uses and starts: by sequence.
    AdapterStep(std::vector<AdapterUses> uses, const int32_t* row_starts);

    // Compute what the rows add to these products of `in`, which project() adds; at most four.
    void adapt(const Compute& compute, const Activations& in, std::span<Projection> projections);
    // x += what the row's adapters add to its token's embedding.
    void embed(const KernelTable& kernels, int row, int token, int width, float* x) const;

private:
    std::vector<AdapterUses> uses_;
    std::vector<int> row_starts_;
    LowRankRows rows_[4];
};

// out += scale * b low of a pair whose low is known.
void add_low_rank(const KernelTable& kernels, const LowRankPair& pair, const float* low, int group, int rows,
                  float* out);

}  // namespace kvarn
