// Load- and bind-time checks. Kernels never throw; everything a caller can cause is refused here.
#pragma once
#include <stdexcept>
#include <string>

namespace kvarn {

inline void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

}  // namespace kvarn
