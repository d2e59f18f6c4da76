/* One client's dense layers, or a block's, all of them in a call: the bytes that torch gives. Many
   products are its library's, called with the arguments that torch calls it with. Those of a few examples, for
   which a library is slow, are made here: in the library's own order, where trials found it out.
   What is between the products takes longer to launch than to do. */

#include <stddef.h>
#include <string.h>

/* In products made here a product and its sum are one rounding, as they are in the library. */
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")

/* A linear layer and what follows it. `weight` (row by row, [outputs, inputs]) and `bias` (-1:
   none) are places in a client's row; `values` and `deltas` are places in its buffer, of a batch's
   outputs and of their gradients before the activation, both [batch, outputs]. A sum of products
   is made in runs of `run` products, and of `run_back` on the way back, each added to those before
   it (0: by the library); `folds`: what is subtracted is made here. */
typedef struct {
    int inputs, outputs, relu, run, run_back, folds;
    ptrdiff_t weight, bias, values, deltas;
} layer;

/* Layers that batches of one size go through; of a client's buffer its size, and where there is
   room for [batch, outputs] and [batch, inputs] of any layer. */
typedef struct {
    const layer *layers;
    int count, batch;
    ptrdiff_t size, room;
} network;

#if defined(__AVX512F__) && !defined(__clang__)
/* Products of 4 to 12 examples, for processors that have the registers. */

#define INLINE static inline __attribute__((always_inline))
#define MAKES_FEW 1
#define FLOAT(MADE) MADE

enum { LANES = 16, EXAMPLES = 12, COLUMNS = 2 * LANES, FOLDED = 8 };

typedef float lanes_t __attribute__((vector_size(64)));
typedef float loose_t __attribute__((vector_size(64), aligned(4), may_alias));
typedef int places_t __attribute__((vector_size(64)));

INLINE lanes_t from(const float *x) { return *(const loose_t *)x; }
INLINE void put(float *x, lanes_t values) { *(loose_t *)x = values; }
INLINE lanes_t everywhere(float x) { return x - (lanes_t){0}; }

/* Of two registers, in each quarter: their first (LOW) or last two numbers in turns, or their first
   or last two pairs; and all even, or all odd, quarters. */
#define LOW(a, b)                                                                                 \
    __builtin_shuffle(a, b, (places_t){0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29})
#define HIGH(a, b)                                                                                \
    __builtin_shuffle(a, b, (places_t){2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31})
#define LOW_PAIRS(a, b)                                                                           \
    __builtin_shuffle(a, b, (places_t){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29})
#define HIGH_PAIRS(a, b)                                                                          \
    __builtin_shuffle(a, b, (places_t){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31})
#define EVEN_QUARTERS(a, b)                                                                       \
    __builtin_shuffle(a, b, (places_t){0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27})
#define ODD_QUARTERS(a, b)                                                                        \
    __builtin_shuffle(a, b, (places_t){4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31})

/* Sixteen columns of sixteen rows that lie `stride` apart; of fewer rows with the last one in the
   place of those that are missing. */
INLINE void transpose(const float *rows, int count, ptrdiff_t stride, lanes_t *columns)
{
    lanes_t four[4][4]; /* of four rows columns j, 4 + j, 8 + j and 12 + j, a quarter each */
#define ROW(i) from(rows + ((i) < count ? (i) : count - 1) * stride)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        lanes_t a = ROW(4 * i), b = ROW(4 * i + 1), c = ROW(4 * i + 2), d = ROW(4 * i + 3);
        lanes_t low = LOW(a, b), high = HIGH(a, b), low_next = LOW(c, d), high_next = HIGH(c, d);
        four[i][0] = LOW_PAIRS(low, low_next);
        four[i][1] = HIGH_PAIRS(low, low_next);
        four[i][2] = LOW_PAIRS(high, high_next);
        four[i][3] = HIGH_PAIRS(high, high_next);
    }
#undef ROW
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        lanes_t even = EVEN_QUARTERS(four[0][j], four[1][j]);
        lanes_t odd = ODD_QUARTERS(four[0][j], four[1][j]);
        lanes_t even_next = EVEN_QUARTERS(four[2][j], four[3][j]);
        lanes_t odd_next = ODD_QUARTERS(four[2][j], four[3][j]);
        columns[j] = EVEN_QUARTERS(even, even_next);
        columns[4 + j] = EVEN_QUARTERS(odd, odd_next);
        columns[8 + j] = ODD_QUARTERS(even, even_next);
        columns[12 + j] = ODD_QUARTERS(odd, odd_next);
    }
}

/* Outputs of `rows` rows `weight` [rows, inputs], sixteen or fewer, for x [examples, inputs]; of
   sixteen numbers at `bias`, and into as many at `outputs`. */
INLINE void some_outputs(const int examples, int rows, const float *weight, const float *bias,
                         const float *x, ptrdiff_t inputs, ptrdiff_t run, float *outputs,
                         ptrdiff_t stride)
{
    lanes_t total[EXAMPLES] = {0}, sum[EXAMPLES], columns[LANES], last[LANES];
    for (ptrdiff_t first = 0; first < inputs; first += run) {
        ptrdiff_t end = inputs - first < run ? inputs : first + run, k = first;
#pragma GCC unroll 12
        for (int i = 0; i < examples; i++)
            sum[i] = (lanes_t){0};
        for (; k + LANES <= end; k += LANES) {
            transpose(weight + k, rows, inputs, columns);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
#pragma GCC unroll 12
                for (int i = 0; i < examples; i++)
                    sum[i] += everywhere(x[i * inputs + k + j]) * columns[j];
        }
        if (k < end) {
            /* A whole register's, of which those before have been added. */
            transpose(weight + end - LANES, rows, inputs, last);
            for (; k < end; k++)
#pragma GCC unroll 12
                for (int i = 0; i < examples; i++)
                    sum[i] += everywhere(x[i * inputs + k]) * last[k - end + LANES];
        }
#pragma GCC unroll 12
        for (int i = 0; i < examples; i++)
            total[i] = first ? total[i] + sum[i] : bias ? from(bias) + sum[i] : sum[i];
    }
#pragma GCC unroll 12
    for (int i = 0; i < examples; i++)
        put(outputs + i * stride, total[i]);
}

/* The gradient of thirty-two inputs, those of the columns at `weight` [outputs, stride], from
   deltas [examples, outputs]. */
INLINE void some_inputs(const int examples, const float *weight, const float *deltas,
                        ptrdiff_t outputs, ptrdiff_t run, float *below, ptrdiff_t stride)
{
    lanes_t total[EXAMPLES][2] = {0}, sum[EXAMPLES][2];
    for (ptrdiff_t first = 0; first < outputs; first += run) {
        ptrdiff_t end = outputs - first < run ? outputs : first + run;
#pragma GCC unroll 12
        for (int i = 0; i < examples; i++)
            sum[i][0] = sum[i][1] = (lanes_t){0};
        for (ptrdiff_t k = first; k < end; k++) {
            const float *row = weight + k * stride;
            lanes_t left = from(row), right = from(row + LANES);
#pragma GCC unroll 12
            for (int i = 0; i < examples; i++) {
                lanes_t delta = everywhere(deltas[i * outputs + k]);
                sum[i][0] += delta * left;
                sum[i][1] += delta * right;
            }
        }
#pragma GCC unroll 12
        for (int i = 0; i < examples; i++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                total[i][half] = first ? total[i][half] + sum[i][half] : sum[i][half];
    }
#pragma GCC unroll 12
    for (int i = 0; i < examples; i++) {
        put(below + i * stride, total[i][0]);
        put(below + i * stride + LANES, total[i][1]);
    }
}

/* A call with the number of examples as a constant, so that sums stay in registers. */
#define OF_EXAMPLES(COUNT, CALL)                                                                  \
    switch (COUNT) {                                                                              \
    case 4: CALL(4); break;                                                                       \
    case 5: CALL(5); break;                                                                       \
    case 6: CALL(6); break;                                                                       \
    case 7: CALL(7); break;                                                                       \
    case 8: CALL(8); break;                                                                       \
    case 9: CALL(9); break;                                                                       \
    case 10: CALL(10); break;                                                                     \
    case 11: CALL(11); break;                                                                     \
    case 12: CALL(12); break;                                                                     \
    }

/* Fewer than sixteen outputs, of any batch that is not smaller than 4. */
static void narrow_outputs_of(const layer *l, int batch, const float *row, const float *x,
                              float *outputs)
{
    const size_t bytes = (size_t)l->outputs * sizeof(float);
    float bias[LANES] = {0}, wide[EXAMPLES * LANES];
    if (l->bias >= 0)
        memcpy(bias, row + l->bias, bytes);
    for (int left = batch, pieces = (batch + EXAMPLES - 1) / EXAMPLES; left; pieces--) {
        int examples = left / pieces;
#define CALL(N)                                                                                   \
    some_outputs(N, l->outputs, row + l->weight, l->bias < 0 ? NULL : bias, x, l->inputs, l->run, \
                 wide, LANES)
        OF_EXAMPLES(examples, CALL)
#undef CALL
        for (int i = 0; i < examples; i++, outputs += l->outputs)
            memcpy(outputs, wide + i * LANES, bytes);
        x += (ptrdiff_t)examples * l->inputs;
        left -= examples;
    }
}

/* Outputs [batch, outputs], sixteen at a time; the last ones along with some before them. */
static void outputs_of(const layer *l, int batch, const float *row, const float *x, float *outputs)
{
    if (l->outputs < LANES) {
        narrow_outputs_of(l, batch, row, x, outputs);
        return;
    }
    for (int first = 0; first < l->outputs; first += LANES) {
        int o = first + LANES <= l->outputs ? first : l->outputs - LANES;
        const float *weight = row + l->weight + (ptrdiff_t)o * l->inputs;
        const float *bias = l->bias < 0 ? NULL : row + l->bias + o;
#define CALL(N)                                                                                   \
    some_outputs(N, LANES, weight, bias, x, l->inputs, l->run, outputs + o, l->outputs)
        OF_EXAMPLES(batch, CALL)
#undef CALL
    }
}

/* Gradients of inputs [batch, inputs] from `deltas` [batch, outputs]; likewise. */
static void inputs_of(const layer *l, int batch, const float *row, const float *deltas,
                      float *below)
{
    for (int first = 0; first < l->inputs; first += COLUMNS) {
        int k = first + COLUMNS <= l->inputs ? first : l->inputs - COLUMNS;
#define CALL(N)                                                                                   \
    some_inputs(N, row + l->weight + k, deltas, l->outputs, l->run_back, below + k, l->inputs)
        OF_EXAMPLES(batch, CALL)
#undef CALL
    }
}

/* `count` rows `weight` [count, inputs] plus the products of deltas [examples, outputs] and x
   [examples, inputs], summed over the examples: into `into`, which may be `weight`. */
INLINE void some_folded(const int examples, ptrdiff_t inputs, int count, const float *x,
                        const float *deltas, ptrdiff_t outputs, const float *weight, float *into)
{
    ptrdiff_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        lanes_t columns[EXAMPLES];
#pragma GCC unroll 12
        for (int i = 0; i < examples; i++)
            columns[i] = from(x + i * inputs + k);
        for (int o = 0; o < count; o++) {
            lanes_t sum = {0};
#pragma GCC unroll 12
            for (int i = 0; i < examples; i++)
                sum += everywhere(deltas[i * outputs + o]) * columns[i];
            put(into + o * inputs + k, from(weight + o * inputs + k) + sum);
        }
    }
    for (; k < inputs; k++)
        for (int o = 0; o < count; o++) {
            float sum = 0;
            for (int i = 0; i < examples; i++)
                sum += deltas[i * outputs + o] * x[i * inputs + k];
            into[o * inputs + k] = weight[o * inputs + k] + sum;
        }
}

/* A layer's weights at `old` plus such products, to `row`: a few outputs at a time, whose weights
   are at hand when they are written. */
static void fold(const layer *l, int batch, const float *x, const float *deltas, const float *old,
                 float *row)
{
    for (int o = 0; o < l->outputs; o += FOLDED) {
        int count = o + FOLDED <= l->outputs ? FOLDED : l->outputs - o;
        ptrdiff_t first = l->weight + (ptrdiff_t)o * l->inputs;
#define CALL(N)                                                                                   \
    some_folded(N, l->inputs, count, x, deltas + o, l->outputs, old + first, row + first)
        OF_EXAMPLES(batch, CALL)
#undef CALL
    }
}

/* `alpha` times x, as the library multiplies it first. */
static const float *times(float alpha, const float *x, ptrdiff_t count, float *room)
{
    for (ptrdiff_t i = 0; i < count; i++)
        room[i] = alpha * x[i];
    return room;
}

#else
#define MAKES_FEW 0
#define FLOAT(MADE)
#endif

#pragma GCC pop_options

/* In float64 all products are the library's. */
#define DOUBLE(MADE)

/* Whether products of few examples are made here, of float32. */
int makes_few(void)
{
    return MAKES_FEW;
}

#define LAYERS_OF(TYPE, ONLY)                                                                     \
    typedef void product_##TYPE(const char *, const char *, const int *, const int *, const int *,\
                                const TYPE *, const TYPE *, const int *, const TYPE *,            \
                                const int *, const TYPE *, TYPE *, const int *);                  \
    typedef void vector_product_##TYPE(const char *, const int *, const int *, const TYPE *,      \
                                       const TYPE *, const int *, const TYPE *, const int *,      \
                                       const TYPE *, TYPE *, const int *);                        \
                                                                                                  \
    /* Outputs of all layers for inputs xs [clients, batch, inputs], which lie `x_stride` apart,  \
       as rows lie `stride` apart. */                                                             \
    void forward_##TYPE(product_##TYPE *product, const network *net, int clients,                 \
                        const TYPE *row, ptrdiff_t stride, const TYPE *xs, ptrdiff_t x_stride,    \
                        TYPE *buffer)                                                             \
    {                                                                                             \
        const TYPE one = 1, zero = 0;                                                             \
        const int batch = net->batch;                                                             \
        for (; clients; clients--, row += stride, xs += x_stride, buffer += net->size) {          \
            const TYPE *x = xs;                                                                   \
            for (const layer *l = net->layers; l < net->layers + net->count; l++) {               \
                TYPE *outputs = buffer + l->values;                                               \
                size_t size = (size_t)batch * (size_t)l->outputs;                                 \
                if (l->run) {                                                                     \
                    ONLY(outputs_of(l, batch, row, x, outputs);)                                  \
                } else {                                                                          \
                    if (l->bias >= 0)                                                             \
                        for (int example = 0; example < batch; example++)                         \
                            memcpy(outputs + (size_t)example * (size_t)l->outputs,                \
                                   row + l->bias, (size_t)l->outputs * sizeof(TYPE));             \
                    product("t", "n", &l->outputs, &batch, &l->inputs, &one, row + l->weight,     \
                            &l->inputs, x, &l->inputs, l->bias >= 0 ? &one : &zero, outputs,      \
                            &l->outputs);                                                         \
                }                                                                                 \
                if (l->relu)                                                                      \
                    for (size_t i = 0; i < size; i++)                                             \
                        outputs[i] = outputs[i] < 0 ? 0 : outputs[i];                             \
                x = outputs;                                                                      \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* Gradients of one client's outputs of all layers, from `delta` [batch, outputs] of what the \
       last one gives; and of the inputs, where `below` [batch, inputs] is given. */              \
    static void back_##TYPE(product_##TYPE *product, const network *net, const TYPE *row,         \
                            TYPE *buffer, const TYPE *delta, TYPE *below)                         \
    {                                                                                             \
        const TYPE one = 1, zero = 0;                                                             \
        const int batch = net->batch;                                                             \
        for (const layer *l = net->layers + net->count - 1; l >= net->layers; l--) {              \
            TYPE *deltas = buffer + l->deltas;                                                    \
            const TYPE *values = buffer + l->values;                                              \
            size_t size = (size_t)batch * (size_t)l->outputs;                                     \
            if (l->relu)                                                                          \
                for (size_t i = 0; i < size; i++)                                                 \
                    deltas[i] = values[i] <= 0 ? 0 : delta[i];                                    \
            else if (delta != deltas)                                                             \
                memcpy(deltas, delta, size * sizeof(TYPE));                                       \
            TYPE *next = l > net->layers ? buffer + (l - 1)->deltas : below;                      \
            if (!next)                                                                            \
                break;                                                                            \
            if (l->run_back) {                                                                    \
                ONLY(inputs_of(l, batch, row, deltas, next);)                                     \
            } else                                                                                \
                product("n", "n", &l->inputs, &batch, &l->outputs, &one, row + l->weight,         \
                        &l->inputs, deltas, &l->outputs, &zero, next, &l->inputs);                \
            delta = next;                                                                         \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* The same of all clients, whose `delta` and `below` lie one after another. */               \
    void backward_##TYPE(product_##TYPE *product, const network *net, int clients,                \
                         const TYPE *row, ptrdiff_t stride, TYPE *buffer, const TYPE *delta,      \
                         TYPE *below)                                                             \
    {                                                                                             \
        const int outputs = net->layers[net->count - 1].outputs, inputs = net->layers->inputs;    \
        for (int c = 0; c < clients; c++)                                                         \
            back_##TYPE(product, net, row + c * stride, buffer + c * net->size,                   \
                        delta + (ptrdiff_t)c * net->batch * outputs,                              \
                        below ? below + (ptrdiff_t)c * net->batch * inputs : NULL);               \
    }                                                                                             \
                                                                                                  \
    /* What is left of one client's row, `old`, less a gradient times -`alpha`: into `row`, which \
       may be `old`. `ones` has `batch` of them. */                                               \
    void update_##TYPE(product_##TYPE *product, vector_product_##TYPE *vector_product,            \
                       const network *net, const TYPE *old, TYPE *row, const TYPE *x,             \
                       TYPE *buffer, const TYPE *ones, TYPE alpha)                                \
    {                                                                                             \
        const TYPE one = 1;                                                                       \
        const int next = 1, batch = net->batch;                                                   \
        for (const layer *l = net->layers; l < net->layers + net->count; l++) {                   \
            const TYPE *deltas = buffer + l->deltas;                                              \
            if (old != row && l->bias >= 0)                                                       \
                memcpy(row + l->bias, old + l->bias, (size_t)l->outputs * sizeof(TYPE));          \
            if (l->folds && alpha != 0) {                                                         \
                ONLY(x = times(alpha, x, (ptrdiff_t)batch * l->inputs, buffer + net->room);       \
                     fold(l, batch, x, deltas, old, row);)                                        \
            } else {                                                                              \
                if (old != row)                                                                   \
                    memcpy(row + l->weight, old + l->weight,                                      \
                           (size_t)l->inputs * (size_t)l->outputs * sizeof(TYPE));                \
                product("n", "t", &l->inputs, &l->outputs, &batch, &alpha, x, &l->inputs, deltas, \
                        &l->outputs, &one, row + l->weight, &l->inputs);                          \
            }                                                                                     \
            if (l->bias >= 0)                                                                     \
                vector_product("n", &l->outputs, &batch, &alpha, deltas, &l->outputs, ones,       \
                               &next, &one, row + l->bias, &next);                                \
            x = buffer + l->values;                                                               \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* Minus the sum of `count` numbers that lie `stride` apart. */                               \
    static TYPE minus_sum_##TYPE(const TYPE *x, int count, ptrdiff_t stride)                      \
    {                                                                                             \
        TYPE sum = 0;                                                                             \
        for (; count; count--, x += stride)                                                       \
            sum -= *x;                                                                            \
        return sum;                                                                               \
    }                                                                                             \
                                                                                                  \
    /* Rows of all clients, each less its rate times its gradient; likewise. */                   \
    void subtract_##TYPE(product_##TYPE *product, const network *net, int clients,                \
                         const TYPE *rates, const TYPE *old, ptrdiff_t old_stride, TYPE *row,     \
                         ptrdiff_t stride, const TYPE *xs, ptrdiff_t x_stride, TYPE *buffer)      \
    {                                                                                             \
        const TYPE one = 1;                                                                       \
        const int batch = net->batch;                                                             \
        for (int c = 0; c < clients; c++, old += old_stride, row += stride, buffer += net->size) {\
            const TYPE *x = xs + c * x_stride;                                                    \
            TYPE *scaled = buffer + net->room;                                                    \
            for (const layer *l = net->layers; l < net->layers + net->count; l++) {               \
                const TYPE *deltas = buffer + l->deltas;                                          \
                size_t size = (size_t)batch * (size_t)l->outputs;                                 \
                for (size_t i = 0; i < size; i++)                                                 \
                    scaled[i] = -(deltas[i] * rates[c]);                                          \
                if (l->folds) {                                                                   \
                    ONLY(fold(l, batch, x, scaled, old, row);)                                    \
                } else {                                                                          \
                    if (old != row)                                                               \
                        memcpy(row + l->weight, old + l->weight,                                  \
                               (size_t)l->inputs * (size_t)l->outputs * sizeof(TYPE));            \
                    product("n", "t", &l->inputs, &l->outputs, &batch, &one, x, &l->inputs,       \
                            scaled, &l->outputs, &one, row + l->weight, &l->inputs);              \
                }                                                                                 \
                if (l->bias >= 0)                                                                 \
                    for (int o = 0; o < l->outputs; o++)                                          \
                        row[l->bias + o] = old[l->bias + o]                                       \
                            - minus_sum_##TYPE(scaled + o, batch, l->outputs);                    \
                x = buffer + l->values;                                                           \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* Inner products of the examples' gradients of two batches, [batch, batch]: those of their   \
       deltas times those of the layer's inputs (and a 1, for the bias), added up over the layers.\
       They are the last of three matrices, `stride` apart; the others are room to work in. */    \
    void inner_##TYPE(product_##TYPE *product, const network *net, const TYPE *x,                 \
                      const TYPE *buffer, const TYPE *other_x, const TYPE *other_buffer,          \
                      TYPE *matrices, ptrdiff_t stride)                                           \
    {                                                                                             \
        const TYPE one = 1, zero = 0;                                                             \
        const layer *layers = net->layers, *last = layers + net->count - 1;                       \
        const int batch = net->batch;                                                             \
        const size_t size = (size_t)batch * (size_t)batch;                                        \
        TYPE *of_deltas = matrices, *of_inputs = matrices + stride, *total = of_inputs + stride;  \
        for (const layer *l = last; l >= layers; l--) {                                           \
            const TYPE *inputs = l > layers ? buffer + (l - 1)->values : x;                       \
            const TYPE *other_inputs = l > layers ? other_buffer + (l - 1)->values : other_x;     \
            product("t", "n", &batch, &batch, &l->outputs, &one, other_buffer + l->deltas,        \
                    &l->outputs, buffer + l->deltas, &l->outputs, &zero, of_deltas, &batch);      \
            product("t", "n", &batch, &batch, &l->inputs, &one, other_inputs, &l->inputs, inputs, \
                    &l->inputs, &zero, of_inputs, &batch);                                        \
            for (size_t i = 0; i < size; i++) {                                                   \
                TYPE inner = of_deltas[i] * (l->bias >= 0 ? of_inputs[i] + 1 : of_inputs[i]);     \
                total[i] = l == last ? inner : total[i] + inner;                                  \
            }                                                                                     \
        }                                                                                         \
    }

LAYERS_OF(float, FLOAT)
LAYERS_OF(double, DOUBLE)
