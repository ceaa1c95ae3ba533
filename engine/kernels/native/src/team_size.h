// Finds out while running whether the threads of a pool gain anything.
//
// On a machine that is busy with something else a second thread often costs more than it gains: the caller waits for
// chunks whose thread is not scheduled.  So the pool measures, in bursts of calls, the bytes of weights that are read per
// second with the whole team and with the caller alone, and uses whichever is faster.
#pragma once
#include <chrono>
#include <cstdint>

template <class Clock> class TeamSizeBy {
  public:
    explicit TeamSizeBy(bool team_possible) : team_(team_possible), possible_(team_possible) {}

    // Before a call that reads `bytes` of weights: whether the team should take part.
    bool use_team(int64_t bytes) {
        if (!possible_) return false;
        const auto now = Clock::now();
        if (now - last_call_ > kGap) restart(now);  // idle in between: says nothing about speed
        last_call_ = now;
        if (calls_ == kBurst) {
            judge(static_cast<double>(bytes_) / std::chrono::duration<double>(now - begun_).count());
            restart(now);
        }
        ++calls_;
        bytes_ += bytes;
        return team_;
    }

  private:
    static constexpr auto kGap = std::chrono::milliseconds(200);
    static constexpr int kBurst = 64;  // calls: about a dozen layers
    static constexpr int kFewestBursts = 8, kMostBursts = 128;  // between two trials of the other
    static constexpr double kBetter = 1.05;

    void restart(typename Clock::time_point now) {
        begun_ = now;
        calls_ = 0;
        bytes_ = 0;
    }

    void judge(double rate) {
        double &mine = rate_[team_];
        mine = mine == 0 ? rate : 0.75 * mine + 0.25 * rate;
        if (trying_) {
            trying_ = false;
            // The trial's rate is not averaged: the old average is what is being checked.
            rate_[team_] = rate;
            if (rate > kBetter * rate_[!team_]) {
                patience_ = kFewestBursts;
            } else {
                team_ = !team_;
                patience_ = patience_ < kMostBursts ? 2 * patience_ : kMostBursts;
            }
            left_ = patience_;
        } else if (--left_ == 0) {
            trying_ = true;
            team_ = !team_;
        }
    }

    bool team_;
    const bool possible_;
    bool trying_ = false;
    int patience_ = kFewestBursts, left_ = kFewestBursts;
    int calls_ = 0;
    int64_t bytes_ = 0;
    double rate_[2] = {0, 0};
    typename Clock::time_point begun_{}, last_call_{};
};

using TeamSize = TeamSizeBy<std::chrono::steady_clock>;
