#include "adapter.h"

#include <algorithm>

#include "../base/check.h"
#include "project.h"

namespace kvarn {

namespace {

constexpr int kMaxRank = 1024;

size_t padded_rank(int rank) { return static_cast<size_t>(num_groups(rank)) * kLanes; }

}  // namespace

Matrix Adapter::pack(Type type, int rows, int columns, std::span<const uint8_t> source) {
    const size_t bytes = Weights::packed_bytes(type, 1, rows, columns);
    require(used_ + bytes <= region_.bytes(), "the adapter has more values than were announced");
    require(source.size() ==
                static_cast<size_t>(rows) * static_cast<size_t>(columns) * static_cast<size_t>(block_shape(type).bytes),
            "the bytes of a pair do not match its shape");
    Matrix matrix{type, rows, columns, region_.data() + used_};
    pack_groups(type, source.data(), rows, columns, 0, matrix.groups(), matrix.packed);
    used_ += bytes;
    return matrix;
}

void add_low_rank(const KernelTable& kernels, const LowRankPair& pair, const float* low, int group, int rows,
                  float* out) {
    LowRankAddFn add = pair.b.type == Type::F16 ? kernels.low_rank_add_f16 : kernels.low_rank_add_f32;
    add(pair.b.packed + static_cast<size_t>(group) * pair.b.group_bytes(), low, pair.rank(), rows, out);
}

void LowRankRows::begin(int num_rows) {
    first_.assign(static_cast<size_t>(num_rows), -1);
    last_ = first_;
    terms_.clear();
}

void LowRankRows::add(int row, const LowRankPair& pair, float scale) {
    const size_t at = static_cast<size_t>(row);
    const int index = static_cast<int>(terms_.size());
    const size_t low = terms_.empty() ? 0 : terms_.back().low + padded_rank(terms_.back().pair->rank());
    terms_.push_back({&pair, pair.scale * scale, low, -1});
    if (first_[at] < 0) first_[at] = index;
    else terms_[static_cast<size_t>(last_[at])].next = index;
    last_[at] = index;
}

void LowRankRows::multiply(const Compute& compute, const float* values, int columns) {
    low_.resize(terms_.back().low + padded_rank(terms_.back().pair->rank()));
    auto multiply_row = [&](int row, int) {
        const float* x = values + static_cast<size_t>(row) * static_cast<size_t>(columns);
        for (int i = first_[static_cast<size_t>(row)]; i >= 0; i = terms_[static_cast<size_t>(i)].next) {
            const Term& term = terms_[static_cast<size_t>(i)];
            const Matrix& a = term.pair->a;
            auto in = a.type == Type::F16 ? compute.kernels.low_rank_in_f16 : compute.kernels.low_rank_in_f32;
            in(a.packed, x, columns, a.rows, term.scale, low_.data() + term.low);
        }
    };
    if (terms_.size() == 1) return multiply_row(static_cast<int>(std::ranges::find(first_, 0) - first_.begin()), 0);
    compute.pool.run(static_cast<int>(first_.size()), multiply_row);
}

void LowRankRows::add_to(const KernelTable& kernels, int row, int group, int rows, float* out) const {
    for (int i = first_[static_cast<size_t>(row)]; i >= 0; i = terms_[static_cast<size_t>(i)].next) {
        const Term& term = terms_[static_cast<size_t>(i)];
        add_low_rank(kernels, *term.pair, low_.data() + term.low, group, rows, out);
    }
}

AdapterStep::AdapterStep(std::vector<AdapterUses> uses, const int32_t* row_starts)
    : uses_(std::move(uses)), row_starts_(row_starts, row_starts + uses_.size() + 1) {}

void AdapterStep::adapt(const Compute& compute, const Activations& in, std::span<Projection> projections) {
    for (size_t p = 0; p < projections.size(); ++p) {
        LowRankRows& rows = rows_[p];
        rows.begin(in.n);
        for (size_t s = 0; s < uses_.size(); ++s)
            for (const AdapterUse& use : uses_[s])
                if (const LowRankPair* pair = use.adapter->of(projections[p].weight))
                    for (int row = row_starts_[s]; row < row_starts_[s + 1]; ++row) rows.add(row, *pair, use.scale);
        if (rows.empty()) continue;
        rows.multiply(compute, in.values, in.k);
        projections[p].low_rank = &rows;
    }
}

void AdapterStep::embed(const KernelTable& kernels, int row, int token, int width, float* x) const {
    auto after = std::upper_bound(row_starts_.begin(), row_starts_.end(), row);
    for (const AdapterUse& use : uses_[static_cast<size_t>(after - row_starts_.begin()) - 1]) {
        const LowRankPair& pair = use.adapter->embedding;
        if (pair.a.packed == nullptr) continue;
        float low[kMaxRank];
        unpack_row(pair.a.type, pair.a.packed, pair.rank(), token, low);
        for (int j = 0; j < pair.rank(); ++j) low[j] *= pair.scale * use.scale;
        add_low_rank(kernels, pair, low, 0, width, x);
    }
}

}  // namespace kvarn
