// Which way a pool goes on machines that become busy and quiet again, by a clock that stands still between calls.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "team_size.h"

namespace {

struct Clock {
    using duration = std::chrono::nanoseconds;
    using time_point = std::chrono::time_point<Clock, duration>;
    static time_point time;
    static time_point now() { return time; }
};
Clock::time_point Clock::time{std::chrono::seconds(1)};

using Size = TeamSizeBy<Clock>;
constexpr int64_t kBytes = 1 << 20;

// The part of `calls` calls that a team made, where a call takes so many microseconds either way.
double by_team(Size &size, int calls, int team_us, int alone_us) {
    int made = 0;
    for (int call = 0; call < calls; ++call) {
        const bool team = size.use_team(kBytes);
        made += team;
        Clock::time += std::chrono::microseconds(team ? team_us : alone_us);
    }
    return static_cast<double>(made) / calls;
}

void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "busy_machine: %s\n", what);
    std::exit(1);
}

}  // namespace

int main() {
    Size quiet(true);
    require(by_team(quiet, 20000, 100, 190) > 0.8, "a team that is nearly twice as fast is left");
    Size busy(true);
    by_team(busy, 2000, 400, 190);
    require(by_team(busy, 20000, 400, 190) < 0.2, "a team that is slower goes on");
    // What was found does not hold forever.
    by_team(busy, 20000, 100, 190);
    require(by_team(busy, 20000, 100, 190) > 0.8, "a team that has become faster is not tried again");
    by_team(busy, 20000, 400, 190);
    require(by_team(busy, 20000, 400, 190) < 0.2, "a team that has become slower goes on");
    Size equal(true);
    require(by_team(equal, 20000, 190, 190) >= 0.0, "no answer");
    Size alone(false);
    require(by_team(alone, 100, 1, 100) == 0, "a team of one");
    // Silence between two answers is not slowness.
    Size patient(true);
    for (int answer = 0; answer < 300; ++answer) {
        Clock::time += std::chrono::seconds(5);
        by_team(patient, 200, 100, 190);
    }
    require(by_team(patient, 2000, 100, 190) > 0.7, "pauses between answers count as slowness");
    return 0;
}
