// Whose step it is: a lock that serves those who wait in the order in which they came. With a plain mutex, one that
// locks again at once, as loading a model does between two slices, would keep the others waiting.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace kvarn {

class Turn {
public:
    void lock() {
        std::unique_lock lock(mutex_);
        uint64_t mine = next_++;
        served_.wait(lock, [&] { return now_ == mine; });
    }

    void unlock() {
        {
            std::lock_guard lock(mutex_);
            ++now_;
        }
        served_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable served_;
    uint64_t next_ = 0, now_ = 0;  // tickets: the next to be given, the one whose turn it is
};

}  // namespace kvarn
