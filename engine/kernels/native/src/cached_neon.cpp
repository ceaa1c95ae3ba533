#include "cached_impl.h"

const AttendRows kNeonAttend = attend_cached;
