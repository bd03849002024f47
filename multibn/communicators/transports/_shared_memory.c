/* Operations on shared memory that Python lacks: waiting, with the memory order that every processor
   needs, and adding the ranks' slots. See shared_memory.py.

   Addresses are passed as ints, as everywhere in multibn: CPython's limited API has buffers only
   since 3.11. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Counts arrivals. The two numbers are in different cache lines, because waiting ranks keep reading
   the first. Both begin at 0, like all new memory. */
typedef struct {
    uint32_t arrived;
    char padding[124];
    uint32_t sleepers; /* number of ranks that the last one to arrive must wake */
} gate;

#define SPINS 64         /* reads of the gate (2 to 5 us) before a rank calls the kernel */
#define LONGEST_NAP 0.05 /* seconds; after each nap, Python checks for signals */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double at_most(double a, double b) { return a < b ? a : b; }

static void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

/* The counts wrap around: their difference must stay below 2**31. */
static int reached(uint32_t arrived, uint32_t goal) { return (int32_t)(arrived - goal) >= 0; }

static int is_open(gate *g, uint32_t goal) {
    return reached(__atomic_load_n(&g->arrived, __ATOMIC_ACQUIRE), goal);
}

/* Sleeps until woken, until a signal, or for `seconds`, which must be below 1. */
static void nap(gate *g, uint32_t goal, double seconds) {
    struct timespec t = {0, (long)(1e9 * seconds)};
    /* Sequentially consistent, as in `arrive`: either the last rank to arrive sees that this one
       sleeps, or this one sees that arrival. */
    __atomic_add_fetch(&g->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t arrived = __atomic_load_n(&g->arrived, __ATOMIC_SEQ_CST);
    if (!reached(arrived, goal))
        syscall(SYS_futex, &g->arrived, FUTEX_WAIT, arrived, &t, NULL, 0);
    __atomic_sub_fetch(&g->sleepers, 1, __ATOMIC_SEQ_CST);
}

/* Converts the first `wanted` of `all` arguments, addresses or ints, to `found`; 0 on error. */
static int numbers(PyObject *const *arguments, Py_ssize_t given, Py_ssize_t all, Py_ssize_t wanted,
                   uintptr_t *found) {
    if (given != all) {
        PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", given, all);
        return 0;
    }
    for (Py_ssize_t i = 0; i < wanted; i++)
        found[i] = PyLong_AsUnsignedLongLongMask(arguments[i]);
    return !PyErr_Occurred();
}

/* Spins for a few microseconds, and returns whether the goal has been reached. */
static int comes_soon(gate *g, uint32_t goal) {
    for (int i = 0; i < SPINS; i++) {
        if (is_open(g, goal))
            return 1;
        rest();
    }
    return 0;
}

/* arrive(gate, goal, to, source, nbytes): copies bytes, then counts this rank as arrived. The rank
   whose arrival reaches the goal wakes the sleeping ranks. Returns whether the goal is reached
   within a few microseconds. */
static PyObject *py_arrive(PyObject *self, PyObject *const *arguments, Py_ssize_t given) {
    uintptr_t n[5];
    if (!numbers(arguments, given, 5, 5, n))
        return NULL;
    gate *g = (gate *)n[0];
    memcpy((void *)n[2], (void *)n[3], n[4]);
    /* Releases the bytes above. A reader that acquires the last arrival sees the bytes of all. */
    uint32_t arrived = __atomic_add_fetch(&g->arrived, 1, __ATOMIC_SEQ_CST);
    if (arrived == (uint32_t)n[1] && __atomic_load_n(&g->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &g->arrived, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return PyBool_FromLong(comes_soon(g, (uint32_t)n[1]));
}

/* wait(gate, goal, seconds, yielding): returns whether the goal is reached within `seconds`. Calls
   sched_yield for the first `yielding` seconds, then sleeps on the futex. */
static PyObject *py_wait(PyObject *self, PyObject *const *arguments, Py_ssize_t given) {
    uintptr_t n[2];
    if (!numbers(arguments, given, 4, 2, n))
        return NULL;
    gate *g = (gate *)n[0];
    uint32_t goal = (uint32_t)n[1];
    double seconds = PyFloat_AsDouble(arguments[2]), yielding = PyFloat_AsDouble(arguments[3]);
    if (PyErr_Occurred())
        return NULL;
    if (comes_soon(g, goal))
        Py_RETURN_TRUE;
    const double start = now(), end = start + seconds;
    for (double time = start; time < end && !is_open(g, goal); time = now()) {
        const double nap_end = at_most(end, time + LONGEST_NAP);
        const double spin_end = at_most(nap_end, start + yielding);
        Py_BEGIN_ALLOW_THREADS
        if (time >= spin_end)
            nap(g, goal, nap_end - time);
        while (!is_open(g, goal) && now() < spin_end)
            sched_yield();
        Py_END_ALLOW_THREADS
        if (!is_open(g, goal) && PyErr_CheckSignals() < 0)
            return NULL;
    }
    return PyBool_FromLong(is_open(g, goal));
}

/* add(to, rows, stride, num_rows, n): sums rows of n float64 numbers, `stride` bytes apart, in the
   order of the rows, so that all ranks get the same bits. */
static PyObject *py_add(PyObject *self, PyObject *const *arguments, Py_ssize_t given) {
    uintptr_t n[5];
    if (!numbers(arguments, given, 5, 5, n))
        return NULL;
    double *restrict to = (double *)n[0];
    memcpy(to, (void *)n[1], n[4] * sizeof(double));
    for (size_t r = 1; r < n[3]; r++) {
        const double *restrict row = (const double *)(n[1] + r * n[2]);
        for (size_t i = 0; i < n[4]; i++)
            to[i] += row[i];
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"arrive", (PyCFunction)(void (*)(void))py_arrive, METH_FASTCALL, NULL},
    {"wait", (PyCFunction)(void (*)(void))py_wait, METH_FASTCALL, NULL},
    {"add", (PyCFunction)(void (*)(void))py_add, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_shared_memory", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__shared_memory(void) { return PyModule_Create(&module); }
