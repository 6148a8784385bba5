// Kernels over one row of floats, as in test_vector.py.
#include <algorithm>
#include <cmath>

#include "neon_check.h"

namespace kvarn::check {
namespace {

// Seeds of blocks whose two best levels are a unit apart or equal: another order of additions takes another level.
constexpr uint64_t kCloseCalls[] = {346263,   2322818,  2403982,  5123042,  5150325,  5475294,  5661790,  6088010,
                                    8777811,  8850160,  9161828,  10186410, 10242359, 10810658, 10990525, 10993109,
                                    11390752, 13287258, 14675699, 15720034, 16954483, 17032349, 17839582, 18861802};

void levels_are_chosen_in_the_order_of_the_contract(const KernelTable& table) {
    for (uint64_t seed : kCloseCalls) {
        const Floats x = Random{seed}.normals(kQuantBlock);
        int8_t q[2][kQuantBlock];
        float d[2], sum[2];
        int32_t halves[2][2];
        select_table("scalar").quantize_row(x.data(), kQuantBlock, 0, 1, q[0], &d[0], &sum[0], halves[0]);
        table.quantize_row(x.data(), kQuantBlock, 0, 1, q[1], &d[1], &sum[1], halves[1]);
        expect(d[0] == d[1] && sum[0] == sum[1] && std::memcmp(q[0], q[1], kQuantBlock) == 0,
               "quantize_row adds errors in the order of the contract");
    }
}

void quantising_is_exact(const KernelTable& table) {
    const int blocks = 60;
    for (float scale : {1.0f, 1e-3f, 1e30f, 1e-35f, 1e-38f, 1e-44f}) {
        Floats x = Random{17}.normals(32 * blocks, scale);
        std::fill(x.begin() + 32, x.begin() + 64, 0.0f);
        for (int i = 0; i < 32; ++i) x[64 + i] = i == 0 ? 127 : static_cast<float>(i) - 15.5f;  // ties
        x[100] = kNaN, x[140] = kInf, x[170] = -kInf;
        for (int n : {1, 3}) {
            std::vector<int8_t> q[2];
            Floats d[2], sum[2];
            std::vector<int32_t> halves[2];
            const KernelTable* tables[2] = {&select_table("scalar"), &table};
            for (int i = 0; i < 2; ++i) {
                q[i].resize(x.size() * n), d[i].resize(blocks * n), sum[i].resize(blocks * n);
                halves[i].resize(2 * blocks * n);
                tables[i]->quantize_row(x.data(), 32 * blocks, n - 1, n, q[i].data(), d[i].data(), sum[i].data(),
                                        halves[i].data());
            }
            for (int b = 3; b < 6; ++b)
                expect(std::isnan(d[1][b * n + n - 1]), "a block that is not finite has scale NaN");
            for (int i = 0; i < 2; ++i)  // NaNs are equal, whatever their bits
                for (Floats* values : {&d[i], &sum[i]})
                    for (float& value : *values) value = std::isnan(value) ? kNaN : value;
            expect(q[0] == q[1] && halves[0] == halves[1] && same_bits(d[0], d[1]) && same_bits(sum[0], sum[1]),
                   "quantize_row is exact");
        }
    }
}

void norms_agree_with_double(const KernelTable& table) {
    for (int n : kLengths) {
        Random random{static_cast<uint64_t>(n)};
        Floats x = random.normals(n, 3), w = random.normals(n), b = random.normals(n), y(x.size());
        for (float& value : x) value += 1;
        double squares = 0, mean = 0, variance = 0;
        for (float value : x) squares += static_cast<double>(value) * value / n, mean += static_cast<double>(value) / n;
        for (float value : x) variance += (value - mean) * (value - mean) / n;
        table.rms_norm(x.data(), w.data(), 1e-5f, n, y.data());
        for (int i = 0; i < n; ++i) {
            const double exact = x[i] / std::sqrt(squares + 1e-5f) * w[i];
            expect(std::abs(y[i] - exact) <= kF32 * std::abs(exact), "rms_norm agrees with double");
        }
        table.layer_norm(x.data(), w.data(), b.data(), 1e-5f, n, y.data());
        for (int i = 0; i < n; ++i) {
            const double scale = w[i] / std::sqrt(variance + 1e-5f), exact = (x[i] - mean) * scale + b[i];
            const double terms = (std::abs(x[i]) + std::abs(mean)) * std::abs(scale) + std::abs(b[i]);
            expect(std::abs(y[i] - exact) <= kF32 * terms, "layer_norm agrees with double");
        }
    }
}

using GatedFn = void (*)(const float*, const float*, int, float*) noexcept;

void activation_agrees(GatedFn function, const std::string& name, double (*exact)(double)) {
    Floats x = {-1e4f, -89, -60, 60, 89, 1e4f, 0.0f, -0.0f};
    for (int i = -3000; i <= 3000; ++i) x.push_back(static_cast<float>(i) * 0.004f);
    const int n = static_cast<int>(x.size());
    const Floats up = Random{19}.normals(n);
    Floats whole(x.size());
    function(x.data(), up.data(), n, whole.data());
    for (int i = 0; i < n; ++i) {
        const double factor = name == "gelu" ? 1 : up[i];
        expect(std::abs(whole[i] - exact(x[i]) * factor) <= kF32 * std::abs(x[i] * factor) + 1e-37,
               name + " agrees with double");
    }
    for (int start : {1, 2, 3, 6})
        for (int length : {1, 2, 3, 5, 41}) {
            Floats part(x.begin() + start, x.begin() + start + length), y(static_cast<size_t>(length) + 1, -77.0f);
            function(part.data(), up.data() + start, length, y.data());
            expect(std::memcmp(y.data(), whole.data() + start, length * sizeof(float)) == 0 && y[length] == -77.0f,
                   name + " does not depend on the place");
        }
    Floats odd = {kNaN, kInf, 1, kNaN, 2}, y(5);
    function(odd.data(), up.data(), 5, y.data());
    expect(std::isnan(y[0]) && std::isnan(y[3]) && std::isfinite(y[2]) && std::isfinite(y[4]), name + " keeps NaN");
}

const KernelTable* gelu_table = nullptr;

void activations_agree_with_double(const KernelTable& table) {
    gelu_table = &table;
    activation_agrees(table.silu_mul, "silu_mul", [](double x) { return x / (1 + std::exp(-x)); });
    activation_agrees(table.gelu_tanh_mul, "gelu_tanh_mul", [](double x) {
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    });
    const GatedFn gelu = [](const float* x, const float*, int n, float* y) noexcept { gelu_table->gelu(x, n, y); };
    activation_agrees(gelu, "gelu", [](double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); });
}

void sums_and_largest_are_right(const KernelTable& table) {
    for (int n : kLengths) {
        Floats x = Random{23}.normals(n, 5), y = Random{29}.normals(n), expected = y;
        for (int i = 0; i < n; ++i) expected[i] += x[i];
        table.add(x.data(), n, y.data());
        expect(same_bits(y, expected), "add is exact");
        const float max = *std::max_element(x.begin(), x.end());
        double exact = 0, weighted = 0, sums[2];
        for (float value : x) {
            const double below = static_cast<double>(value) - max;
            exact += std::exp(below);
            weighted += std::exp(below) * below;
        }
        table.softmax_sums(x.data(), n, max, sums);
        expect(sums[0] == table.sum_exp(x.data(), n, max), "softmax_sums sums as sum_exp does");
        expect(std::abs(sums[1] - weighted) <= 1e-6 * std::abs(weighted), "softmax_sums agrees with double");
        expect(std::abs(table.sum_exp(x.data(), n, max) - exact) <= 5e-7 * exact, "sum_exp agrees with double");
        for (int at = 0; at < n; at += std::max(1, n / 20)) {
            Floats changed = x;
            changed[at] = 50;
            changed[(at + 1) % n] = n > 1 ? kNaN : 50;
            changed[n - 1] = 50;
            int index[2];
            float value[2];
            select_table("scalar").argmax(changed.data(), n, &index[0], &value[0]);
            table.argmax(changed.data(), n, &index[1], &value[1]);
            expect(index[0] == index[1] && value[0] == value[1], "argmax is exact");
        }
    }
    const Floats lowest(20, -kInf), nans(5, kNaN);
    int index = 7;
    float value = 0;
    table.argmax(lowest.data(), 20, &index, &value);
    expect(index == 0 && value == -kInf, "argmax of -infinity is the first");
    table.argmax(nans.data(), 5, &index, &value);
    expect(index == 0 && value == -kInf, "argmax passes over NaN");
    for (int i = 0; i <= 2000; ++i) {
        const float x = static_cast<float>(i) * -0.0435f, exact = static_cast<float>(std::exp(static_cast<double>(x)));
        const double unit = static_cast<double>(std::nextafter(exact, 2.0f)) - exact;
        expect(std::abs(table.sum_exp(&x, 1, 0) - std::exp(static_cast<double>(x))) <= 4 * unit,
               "exp is within 4 units");
    }
}

}  // namespace

void check_rows(const KernelTable& table) {
    quantising_is_exact(table);
    levels_are_chosen_in_the_order_of_the_contract(table);
    norms_agree_with_double(table);
    activations_agree_with_double(table);
    sums_and_largest_are_right(table);
}

}  // namespace kvarn::check
