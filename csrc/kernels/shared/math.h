// exp, tanh and 1 + erf of vectors of floats. Every instruction set evaluates the same polynomials in the same order,
// so single results have the same bits in all of them.
//
// Polynomials are minimax fits. Worst errors found against double on 23 million values from -1e4 to 1e4:
// exp 1.01 units in the last place, tanh 1.27, 1 + erf 1.7e-7 absolute (its far tail has few right digits).
#pragma once
#include "lanes.h"

namespace kvarn::shared {
namespace {

// Horner's scheme, highest coefficient first, one fma each.
template <class L, class Floats, class... Coefficients>
inline Floats polynomial(Floats x, float highest, Coefficients... coefficients) {
    Floats p = L::set(highest);
    ((p = L::fma(p, x, L::set(coefficients))), ...);
    return p;
}

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2. NaN stays NaN: max and min pass it on.
template <class L, class Floats>
inline Floats exp(Floats x) {
    x = L::min(L::set(89.0f), L::max(L::set(-104.0f), x));
    const auto n = L::nearest_whole(L::mul(x, L::set(1.44269504f)));
    Floats r = L::fnma(n.floats, L::set(0.693145752f), x);  // ln 2 in two parts, the first exact times n
    r = L::fnma(n.floats, L::set(1.42860677e-6f), r);
    Floats p = polynomial<L>(r, 1.395060099e-3f, 8.368953131e-3f, 4.166620597e-2f, 1.666651815e-1f, 0.5f);
    p = L::add(L::fma(p, L::mul(r, r), r), L::set(1.0f));
    return L::times_power_of_two(p, n);
}

// Odd polynomial below 0.625, 1 - 2 / (exp(2|x|) + 1) above.
template <class L, class Floats>
inline Floats tanh(Floats x) {
    const Floats magnitude = L::absolute(x);
    const Floats square = L::mul(x, x);
    const Floats p =
        polynomial<L>(square, -5.717045162e-3f, 2.065058798e-2f, -5.374349654e-2f, 1.333149076e-1f, -3.333328366e-1f);
    const Floats small = L::fma(L::mul(p, square), x, x);
    const Floats e = exp<L>(L::add(magnitude, magnitude));
    const Floats below_one = L::div(L::set(2.0f), L::add(e, L::set(1.0f)));
    const Floats large = L::copy_sign(L::sub(L::set(1.0f), below_one), x);
    return L::choose_greater(magnitude, L::set(0.625f), large, small);
}

// 1 + erf(x): 1 + odd polynomial below 1; above, erfc(|x|) = exp(polynomial), or 2 minus it.
template <class L, class Floats>
inline Floats one_plus_erf(Floats x) {
    const Floats magnitude = L::absolute(x);
    const Floats p = polynomial<L>(L::mul(x, x), 7.647119492e-5f, -7.942356751e-4f, 5.179749802e-3f, -2.684859186e-2f,
                                   1.128343046e-1f, -3.761260509e-1f, 1.128379107f);
    const Floats small = L::fma(p, x, L::set(1.0f));
    const Floats t = L::sub(L::min(L::set(10.0f), magnitude), L::set(2.5f));
    const Floats e = polynomial<L>(t, -2.168676474e-5f, 6.181692879e-5f, -4.309144570e-4f, 2.166523365e-3f,
                                   -1.085349917e-2f, -9.438918233e-1f, -5.352680683f, -7.806815147f);
    const Floats erfc = exp<L>(e);
    const Floats large = L::choose_negative(x, erfc, L::sub(L::set(2.0f), erfc));
    return L::choose_greater(magnitude, L::set(1.0f), large, small);
}

}  // namespace
}  // namespace kvarn::shared
