#include "cached_impl.h"

const AttendRows kPortableAttend = attend_cached;
