// Load- and bind-time checks. Kernels never throw; everything a caller can cause is refused here.
#pragma once
#include <stdexcept>
#include <string>

namespace kvarn {

inline void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

// For checks of every token of a step: the message is made only when it is needed.
template <class Message>
    requires requires(Message message) { std::string(message()); }
void require(bool condition, Message message) {
    if (!condition) throw std::invalid_argument(message());
}

}  // namespace kvarn
