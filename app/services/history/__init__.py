"""The past as the Monitor shows it, in bounded memory: spans while they are recent, sums per bucket ever after."""
