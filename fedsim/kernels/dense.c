/* Dense layers of some clients: outputs, gradients, steps, and inner products of gradients.

   The bytes are the same from every compiler and for every width of a register, as there are only
   two kinds of sum. Where terms are contiguous (a row of weights times an example), a sum has as
   many lanes as 64 bytes have numbers: lane l takes terms l, l + LANES, and so on, and a fixed tree
   joins the lanes, adding the upper half to the lower until one is left. Everywhere else a sum
   takes its terms one after another, and a register holds adjacent sums. A product and its sum are
   one rounding: built with -ffp-contract=fast, on processors that have it. (For single numbers this
   is written out, `FUSED`, since a compiler may multiply several of them before it adds.)
   How many sums are made at once depends on the target's registers and changes no byte. */

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__) && !defined(__FMA__)
#error "a product and its sum must be one rounding"
#endif

#ifdef FLOAT64
typedef double real;
#define SIZE 8
#define FUSED __builtin_fma
#else
typedef float real;
#define SIZE 4
#define FUSED __builtin_fmaf
#endif

/* Bytes of a register; how many rows are multiplied by how many others at once (LEFT by RIGHT), in
   sums of lanes; how many rows by how many registers (ROWS by COLUMNS), in sums term by term. */
#ifndef BYTES
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#endif
#if BYTES == 64
enum { LEFT = 4, RIGHT = 5, ROWS = 5, COLUMNS = 4 };
#else
enum { LEFT = 2, RIGHT = BYTES == 32 ? 3 : 2, ROWS = 3, COLUMNS = 4 };
#endif
#define WIDTH (BYTES / SIZE)
enum { LANES = 64 / SIZE, PARTS = 64 / BYTES, CACHED = 4096, LONG = 32 };

/* Keeps a value in its register: GCC would read it again for each of two products, and reading is
   what limits sums of lanes. Not needed with 64 bytes, where there are more than two products. */
#if defined(__x86_64__) && BYTES < 64
#define IN_REGISTER(x) __asm__("" : "+x"(x))
#else
#define IN_REGISTER(x) (void)(x)
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef real vec __attribute__((vector_size(BYTES)));
typedef real loose_vec __attribute__((vector_size(BYTES), aligned(SIZE), may_alias));

INLINE vec load(const real *x) { return *(const loose_vec *)x; }
INLINE void store(real *x, vec values) { *(loose_vec *)x = values; }
INLINE vec spread(real x) { return x - (vec){0}; }

/* Sums of neighbouring pieces of `h` numbers in two registers: even pieces plus odd ones. */
#define EVEN(i, h) ((i) / (h) * 2 * (h) + (i) % (h))
#define ODD(i, h) (EVEN(i, h) + (h))
#define FOUR(PIECE, i, h) PIECE(i, h), PIECE((i) + 1, h), PIECE((i) + 2, h), PIECE((i) + 3, h)
#if WIDTH == 16
#define ALL(PIECE, h)                                                                             \
    FOUR(PIECE, 0, h), FOUR(PIECE, 4, h), FOUR(PIECE, 8, h), FOUR(PIECE, 12, h)
#elif WIDTH == 8
#define ALL(PIECE, h) FOUR(PIECE, 0, h), FOUR(PIECE, 4, h)
#elif WIDTH == 4
#define ALL(PIECE, h) FOUR(PIECE, 0, h)
#else
#define ALL(PIECE, h) PIECE(0, h), PIECE(1, h)
#endif
#define JOINED(a, b, h)                                                                           \
    (__builtin_shufflevector(a, b, ALL(EVEN, h)) + __builtin_shufflevector(a, b, ALL(ODD, h)))

/* The lanes of four totals, joined by the fixed tree into four sums. */
INLINE void join(const vec *a, const vec *b, const vec *c, const vec *d, real *sums)
{
    const vec *totals[4] = {a, b, c, d};
    vec t[4], joined;
    real numbers[WIDTH];
UNROLL
    for (int i = 0; i < 4; i++) {
        const vec *total = totals[i];
#if BYTES == 64
        t[i] = total[0];
#elif BYTES == 32
        t[i] = total[0] + total[1];
#else
        t[i] = (total[0] + total[2]) + (total[1] + total[3]);
#endif
    }
    /* Four registers, one for each total, are folded together until one holds all four sums. */
#if WIDTH == 2
    sums[0] = t[0][0] + t[0][1], sums[1] = t[1][0] + t[1][1];
    sums[2] = t[2][0] + t[2][1], sums[3] = t[3][0] + t[3][1];
    (void)joined, (void)numbers;
#else
    t[0] = JOINED(t[0], t[1], WIDTH / 2);
    t[2] = JOINED(t[2], t[3], WIDTH / 2);
    joined = JOINED(t[0], t[2], WIDTH / 4);
#if WIDTH >= 16
    joined = JOINED(joined, joined, WIDTH / 8);
#endif
#if WIDTH >= 8
    joined = JOINED(joined, joined, 1);
#endif
    store(numbers, joined);
    memcpy(sums, numbers, 4 * sizeof(real));
#endif
}

/* Inner products of `lefts` rows with `rights` others, all of `size` numbers and contiguous: that
   of row l and other row r goes into sums[r * step + l]. */
INLINE void some_products(const int lefts, const int rights, const real *left, const real *right,
                          ptrdiff_t size, real *sums, ptrdiff_t step)
{
    vec total[LEFT * RIGHT + 3][PARTS] = {0}; /* 3 more, since totals are joined by fours */
    real ends[LEFT + RIGHT][LANES], joined[4];
    const ptrdiff_t whole = size / LANES * LANES;
    for (ptrdiff_t k = 0; k < whole; k += LANES)
UNROLL
        for (int part = 0; part < PARTS; part++) {
            vec a[LEFT];
UNROLL
            for (int l = 0; l < lefts; l++)
                a[l] = load(left + l * size + k + part * WIDTH);
UNROLL
            for (int r = 0; r < rights; r++) {
                vec b = load(right + r * size + k + part * WIDTH);
                IN_REGISTER(b);
UNROLL
                for (int l = 0; l < lefts; l++)
                    total[r * lefts + l][part] += b * a[l];
            }
        }
    if (whole < size) { /* the rest, padded with zeros */
        memset(ends, 0, sizeof ends);
        for (int l = 0; l < lefts; l++)
            memcpy(ends[l], left + l * size + whole, (size_t)(size - whole) * sizeof(real));
        for (int r = 0; r < rights; r++)
            memcpy(ends[LEFT + r], right + r * size + whole, (size_t)(size - whole) * sizeof(real));
UNROLL
        for (int part = 0; part < PARTS; part++)
UNROLL
            for (int r = 0; r < rights; r++)
UNROLL
                for (int l = 0; l < lefts; l++)
                    total[r * lefts + l][part] +=
                        load(ends[LEFT + r] + part * WIDTH) * load(ends[l] + part * WIDTH);
    }
UNROLL
    for (int i = 0; i < lefts * rights; i += 4) {
        join(total[i], total[i + 1], total[i + 2], total[i + 3], joined);
UNROLL
        for (int j = 0; j < 4; j++)
            if (i + j < lefts * rights)
                sums[(i + j) / lefts * step + (i + j) % lefts] = joined[j];
    }
}

/* A call with a number as a compile-time constant, so that sums stay in registers. */
#define WITH_CONSTANT(NUMBER, CALL)                                                               \
    switch (NUMBER) {                                                                             \
    case 1: CALL(1); break;                                                                       \
    case 2: CALL(2); break;                                                                       \
    case 3: CALL(3); break;                                                                       \
    case 4: CALL(4); break;                                                                       \
    default: CALL(5); break;                                                                      \
    }

static void products_of(int lefts, const real *left, int rights, const real *right, ptrdiff_t size,
                        real *sums, ptrdiff_t step)
{
#define ONE(N) some_products(1, N < RIGHT ? N : RIGHT, left, right, size, sums, step)
#define SOME(N) some_products(LEFT, N < RIGHT ? N : RIGHT, left, right, size, sums, step)
    if (lefts == 1)
        WITH_CONSTANT(rights, ONE)
    else
        WITH_CONSTANT(rights, SOME)
#undef ONE
#undef SOME
}

/* Inner products [rights, lefts] of all rows [rights, size] with all rows [lefts, size]. A few of
   the right rows stay in the nearest cache while all left rows are read. */
static void products(const real *left, int lefts, const real *right, int rights, ptrdiff_t size,
                     real *sums)
{
    const int together = lefts < LEFT ? 1 : LEFT;
    for (int first = 0; first < rights; first += 3 * RIGHT) {
        int end = rights - first < 3 * RIGHT ? rights : first + 3 * RIGHT;
        for (int l = 0; l < lefts; l += together) {
            /* The last group overlaps the one before it, whose sums are made again, unchanged. */
            int at = l + together <= lefts ? l : lefts - together;
            for (int r = first, count; r < end; r += count) {
                int pieces = (end - r + RIGHT - 1) / RIGHT;
                count = (end - r) / pieces;
                products_of(together, left + at * size, count, right + r * size, size,
                            sums + (ptrdiff_t)r * lefts + at, lefts);
            }
        }
    }
}

/* `columns` registers of each of `rows` rows: `old`, or zeros, plus the rows of `x`, one after
   another, each times a factor. Rows of `old` and of `x` are `stride` apart. */
INLINE void some_sums(const int rows, const int columns, const real *factors, ptrdiff_t row_step,
                      ptrdiff_t term_step, const real *x, ptrdiff_t terms, ptrdiff_t stride,
                      const real *old, real *sums, ptrdiff_t into_stride)
{
    vec total[ROWS][COLUMNS] = {0};
    if (old)
UNROLL
        for (int r = 0; r < rows; r++)
UNROLL
            for (int c = 0; c < columns; c++)
                total[r][c] = load(old + r * stride + c * WIDTH);
    for (; terms; terms--, factors += term_step, x += stride) {
        vec factor[ROWS];
UNROLL
        for (int r = 0; r < rows; r++)
            factor[r] = spread(factors[r * row_step]);
UNROLL
        for (int c = 0; c < columns; c++) {
            vec numbers = load(x + c * WIDTH);
UNROLL
            for (int r = 0; r < rows; r++)
                total[r][c] += factor[r] * numbers;
        }
    }
UNROLL
    for (int r = 0; r < rows; r++)
UNROLL
        for (int c = 0; c < columns; c++)
            store(sums + r * into_stride + c * WIDTH, total[r][c]);
}

/* One register of each row. Never inlined: it would take registers from its caller. */
static __attribute__((noinline)) void last_sums(int rows, const real *factors, ptrdiff_t row_step,
                                                ptrdiff_t term_step, const real *x,
                                                ptrdiff_t terms, ptrdiff_t stride,
                                                const real *old, real (*sums)[WIDTH])
{
    for (int r = 0; r < rows; r++)
        some_sums(1, 1, factors + r * row_step, 0, term_step, x, terms, stride,
                  old ? old + r * stride : NULL, sums[r], 0);
}

/* The same for `size` numbers of each row. */
INLINE void rows_of_sums(const int rows, const real *factors, ptrdiff_t row_step,
                         ptrdiff_t term_step, const real *x, ptrdiff_t terms, ptrdiff_t size,
                         ptrdiff_t stride, const real *old, real *sums)
{
    const ptrdiff_t last = size - WIDTH;
    const int overlaps = size % WIDTH && last >= 0;
    real ends[ROWS][WIDTH];
    ptrdiff_t k = 0;
    /* The last register overlaps those before it. It is summed first, since `old` may be `sums` and
       is about to be overwritten, and stored last: numbers that are written twice are the same. */
    if (overlaps)
        last_sums(rows, factors, row_step, term_step, x + last, terms, stride,
                  old ? old + last : NULL, ends);
    for (; k + COLUMNS * WIDTH <= size; k += COLUMNS * WIDTH)
        some_sums(rows, COLUMNS, factors, row_step, term_step, x + k, terms, stride,
                  old ? old + k : NULL, sums + k, stride);
    for (; k <= last; k += WIDTH)
        some_sums(rows, 1, factors, row_step, term_step, x + k, terms, stride,
                  old ? old + k : NULL, sums + k, stride);
    if (overlaps)
        for (int r = 0; r < rows; r++)
            memcpy(sums + r * stride + last, ends[r], sizeof ends[r]);
    else
        for (; k < size; k++)
            for (int r = 0; r < rows; r++) {
                real total = old ? old[r * stride + k] : 0;
                for (ptrdiff_t t = 0; t < terms; t++)
                    total = FUSED(factors[r * row_step + t * term_step], x[t * stride + k], total);
                sums[r * stride + k] = total;
            }
}

/* Rows [rows, size]: `old`, which may be `sums`, or zeros (NULL), plus the rows `x` [terms, size],
   one after another, each times factors[row * row_step + term * term_step]. By panels of columns,
   so narrow that what is read again of `x` for other rows stays in the nearest cache. */
static void sums_of(int rows, const real *factors, ptrdiff_t row_step, ptrdiff_t term_step,
                    const real *x, ptrdiff_t terms, ptrdiff_t size, const real *old, real *sums)
{
    ptrdiff_t panel = COLUMNS * WIDTH;
    while (2 * panel * terms <= CACHED)
        panel *= 2;
    for (ptrdiff_t k = 0, width; k < size; k += width) {
        width = size - k >= 2 * panel ? panel : size - k;
        for (int r = 0, count; r < rows; r += count) {
            int pieces = (rows - r + ROWS - 1) / ROWS;
            count = (rows - r) / pieces;
            /* Long sums leave time to fetch the `old` rows of the next ones. */
            const int soon = rows < r + count + ROWS ? rows : r + count + ROWS;
            for (int next = r + count; old && terms >= LONG && next < soon; next++)
                for (ptrdiff_t i = 0; i < width; i += LANES)
                    __builtin_prefetch(old + next * size + k + i);
#define CALL(N)                                                                                   \
    rows_of_sums(N < ROWS ? N : ROWS, factors + r * row_step, row_step, term_step, x + k, terms,  \
                 width, size, old ? old + r * size + k : NULL, sums + r * size + k)
            WITH_CONSTANT(count, CALL)
#undef CALL
        }
    }
}

/* A linear layer, perhaps with ReLU. `weight` ([outputs, inputs]) and `bias` (-1: none) are offsets
   in a client's row; `values` and `deltas` are offsets in its buffer, of a batch's outputs and of
   their gradients before the activation, both [batch, outputs]. */
typedef struct {
    int inputs, outputs, relu;
    ptrdiff_t weight, bias, values, deltas;
} layer;

/* A chain of layers for one batch size, and the size of a client's buffer, which is scratch from
   `room` on. */
typedef struct {
    const layer *layers;
    int count, batch;
    ptrdiff_t size, room;
} network;

/* Outputs of all layers for inputs x [clients, batch, inputs]. */
void forward(const network *net, int clients, const real *row, ptrdiff_t stride, const real *xs,
             ptrdiff_t x_stride, real *buffer)
{
    for (; clients; clients--, row += stride, xs += x_stride, buffer += net->size) {
        const real *x = xs;
        for (const layer *l = net->layers; l < net->layers + net->count; l++) {
            real *outputs = buffer + l->values;
            products(row + l->weight, l->outputs, x, net->batch, l->inputs, outputs);
            for (int i = 0; i < net->batch; i++, outputs += l->outputs) {
                if (l->bias >= 0)
                    for (int o = 0; o < l->outputs; o++)
                        outputs[o] += row[l->bias + o];
                if (l->relu)
                    for (int o = 0; o < l->outputs; o++)
                        outputs[o] = outputs[o] < 0 ? 0 : outputs[o];
            }
            x = buffer + l->values;
        }
    }
}

/* Gradients of the outputs of all layers, from `delta` [clients, batch, outputs] of the last one's;
   and of the inputs [clients, batch, inputs], unless `inputs` is NULL. */
void backward(const network *net, int clients, const real *row, ptrdiff_t stride, real *buffer,
              const real *delta, real *inputs)
{
    const layer *last = net->layers + net->count - 1;
    const ptrdiff_t outputs = (ptrdiff_t)net->batch * last->outputs;
    for (; clients; clients--, row += stride, buffer += net->size, delta += outputs) {
        const real *above = delta;
        for (const layer *l = last; l >= net->layers; l--) {
            real *deltas = buffer + l->deltas;
            const real *values = buffer + l->values;
            const ptrdiff_t size = (ptrdiff_t)net->batch * l->outputs;
            for (ptrdiff_t i = 0; i < size; i++)
                deltas[i] = l->relu && values[i] <= 0 ? 0 : above[i];
            real *below = l > net->layers ? buffer + (l - 1)->deltas : inputs;
            if (below)
                sums_of(net->batch, deltas, l->outputs, 1, row + l->weight, l->outputs, l->inputs,
                        NULL, below);
            above = below;
        }
        if (inputs)
            inputs += (ptrdiff_t)net->batch * net->layers->inputs;
    }
}

/* Rows `old` minus a rate times the gradient, into `row`, which may be `old`. */
void subtract(const network *net, int clients, const real *rates, const real *old,
              ptrdiff_t old_stride, real *row, ptrdiff_t stride, const real *xs,
              ptrdiff_t x_stride, real *buffer)
{
    for (; clients; clients--, rates++, old += old_stride, row += stride, xs += x_stride) {
        const real *x = xs;
        real *scaled = buffer + net->room;
        for (const layer *l = net->layers; l < net->layers + net->count; l++) {
            const ptrdiff_t size = (ptrdiff_t)net->batch * l->outputs;
            for (ptrdiff_t i = 0; i < size; i++)
                scaled[i] = buffer[l->deltas + i] * -*rates;
            sums_of(l->outputs, scaled, 1, l->outputs, x, net->batch, l->inputs,
                    old + l->weight, row + l->weight);
            if (l->bias >= 0)
                for (int o = 0; o < l->outputs; o++) {
                    real bias = old[l->bias + o];
                    for (int i = 0; i < net->batch; i++)
                        bias += scaled[(ptrdiff_t)i * l->outputs + o];
                    row[l->bias + o] = bias;
                }
            x = buffer + l->values;
        }
        buffer += net->size;
    }
}

/* The inner product of two batches' gradients, a number for each client: the sum over all pairs of
   examples and all layers of the inner product of their deltas times that of their inputs (plus 1,
   for the bias). The last two arguments are scratch of [batch, batch] each. */
void inner(const network *net, int clients, const real *xs, ptrdiff_t x_stride, const real *buffer,
           const real *other_xs, ptrdiff_t other_x_stride, const real *other_buffer, real *totals,
           real *of_deltas, real *of_inputs)
{
    const ptrdiff_t size = (ptrdiff_t)net->batch * net->batch;
    for (; clients; clients--, xs += x_stride, other_xs += other_x_stride) {
        const real *x = xs, *other_x = other_xs;
        real total = 0;
        for (const layer *l = net->layers; l < net->layers + net->count; l++) {
            products(other_buffer + l->deltas, net->batch, buffer + l->deltas, net->batch,
                     l->outputs, of_deltas);
            products(other_x, net->batch, x, net->batch, l->inputs, of_inputs);
            for (ptrdiff_t i = 0; i < size; i++)
                total = FUSED(of_deltas[i], of_inputs[i] + (l->bias >= 0), total);
            x = buffer + l->values, other_x = other_buffer + l->values;
        }
        *totals++ = total;
        buffer += net->size, other_buffer += net->size;
    }
}
