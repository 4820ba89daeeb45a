/* A plain call of the target, as the compiler makes it. */
extern Target TARGET;
int through PROTOTYPE { return TARGET ARGUMENTS; }
