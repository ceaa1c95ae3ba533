<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="ja" sourcelanguage="en">
    <context>
        <name>AboutCard</name>
        <message>
            <source>About</source>
            <translation>このアプリについて</translation>
        </message>
        <message>
            <source>Licences</source>
            <translation>ライセンス</translation>
        </message>
        <message>
            <source>Open logs</source>
            <translation>ログを開く</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Python {0}, Qt {1}</source>
            <translation>Python {0}、Qt {1}</translation>
        </message>
        <message>
            <source>Logs</source>
            <translation>ログ</translation>
        </message>
        <message>
            <source>Contain no prompts and no answers: {0}</source>
            <translation>プロンプトも回答も含まれません: {0}</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>レポートを保存…</translation>
        </message>
        <message>
            <source>Report</source>
            <translation>レポート</translation>
        </message>
        <message>
            <source>One file to attach to a bug report: versions, hardware, findings and the end of the logs. </source>
            <translation>不具合の報告に添付するファイルです。バージョン、ハードウェア、検出結果、ログの末尾が入ります。</translation>
        </message>
        <message>
            <source>No prompts, no names; nothing is sent.</source>
            <translation>プロンプトや名前は含まれず、何も送信されません。</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>このPCを調べています…</translation>
        </message>
        <message>
            <source>It is in {0}: read it before you pass it on.</source>
            <translation>{0}にあります。人に渡す前に内容をご確認ください。</translation>
        </message>
    </context>
    <context>
        <name>AnswerCard</name>
        <message>
            <source>Answers</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>More sampling…</source>
            <translation>詳細なサンプリング…</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>最大</translation>
        </message>
        <message>
            <source>tokens</source>
            <translation>トークン</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>温度</translation>
        </message>
        <message>
            <source>Max tokens per answer</source>
            <translation>回答あたりの最大トークン数</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>回答の形式</translation>
        </message>
        <message>
            <source>Text</source>
            <translation>テキスト</translation>
        </message>
        <message>
            <source>One of choices</source>
            <translation>選択肢から1つ</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>スキーマに沿ったJSON</translation>
        </message>
        <message>
            <source>Choices</source>
            <translation>選択肢</translation>
        </message>
        <message>
            <source>One choice per line, such as
positive
negative</source>
            <translation>1行に1つずつ。例:
肯定
否定</translation>
        </message>
        <message>
            <source>JSON schema</source>
            <translation>JSONスキーマ</translation>
        </message>
        <message>
            <source>Enter at least two choices, one per line.</source>
            <translation>選択肢を1行に1つずつ、2つ以上入力してください。</translation>
        </message>
        <message>
            <source>Enter the JSON schema that answers must follow.</source>
            <translation>回答が従うJSONスキーマを入力してください。</translation>
        </message>
        <message>
            <source>The schema is not a JSON object.</source>
            <translation>スキーマがJSONオブジェクトではありません。</translation>
        </message>
        <message>
            <source>The schema is not JSON: {0}.</source>
            <translation>スキーマがJSONではありません: {0}。</translation>
        </message>
        <message>
            <source>Default answer settings</source>
            <translation>回答の既定の設定</translation>
        </message>
    </context>
    <context>
        <name>AnswerMessage</name>
        <message>
            <source>Copy the answer</source>
            <translation>回答をコピー</translation>
        </message>
        <message>
            <source>Answer again</source>
            <translation>もう一度回答</translation>
        </message>
        <message>
            <source>Continue in a new chat</source>
            <translation>新しいチャットで続ける</translation>
        </message>
        <message>
            <source>Edit the answer</source>
            <translation>回答を編集</translation>
        </message>
        <message>
            <source>Delete the answer</source>
            <translation>回答を削除</translation>
        </message>
        <message>
            <source>Continue</source>
            <translation>続ける</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>エンジンを再起動</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>以前のやり取りを要約</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>モデルが要約し、以後はその要約を読みます。</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>最も古いものを除外</translation>
        </message>
        <message>
            <source>The engine is not running. Restart it to get your answer.</source>
            <translation>エンジンが動いていません。回答を得るには再起動してください。</translation>
        </message>
        <message>
            <source>folded, not sent</source>
            <translation>要約済み・送信しません</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>コピーしました</translation>
        </message>
    </context>
    <context>
        <name>AnswerView</name>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>コピー</translation>
        </message>
        <message>
            <source>Copy link</source>
            <translation>リンクをコピー</translation>
        </message>
        <message>
            <source>Select all</source>
            <translation>すべて選択</translation>
        </message>
        <message>
            <source>Copy all as plain text</source>
            <translation>すべてプレーンテキストでコピー</translation>
        </message>
        <message>
            <source>Copy all as Markdown</source>
            <translation>すべてMarkdownでコピー</translation>
        </message>
    </context>
    <context>
        <name>ApiServer</name>
        <message>
            <source>Port {0} is in use by another program, or not allowed. Choose another one.</source>
            <translation>ポート{0}は別のプログラムが使用中か、許可されていません。別のポートを選んでください。</translation>
        </message>
        <message>
            <source>The server stopped unexpectedly. Turn it off and on again.</source>
            <translation>サーバーが予期せず停止しました。いったんオフにしてからオンにしてください。</translation>
        </message>
        <message>
            <source>The server could not be started. Reinstall Switchyard.</source>
            <translation>サーバーを起動できませんでした。Switchyardを再インストールしてください。</translation>
        </message>
    </context>
    <context>
        <name>Asking</name>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>A batch job is running.</source>
            <translation>バッチジョブを実行中です。</translation>
        </message>
        <message>
            <source>Loading a model pauses it. No answered row is lost: you can resume it later, with the same model and precision.</source>
            <translation>モデルを読み込むと一時停止します。回答済みの行は失われません。あとで同じモデルと精度で再開できます。</translation>
        </message>
        <message>
            <source>Pause the job</source>
            <translation>ジョブを一時停止</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0}件のバッチジョブを実行中です。</numerusform>
            </translation>
        </message>
        <message>
            <source>Loading a model pauses them. No answered row is lost: you can resume them later, with the same model and precision.</source>
            <translation>モデルを読み込むと一時停止します。回答済みの行は失われません。あとで同じモデルと精度で再開できます。</translation>
        </message>
        <message>
            <source>Pause the jobs</source>
            <translation>ジョブを一時停止</translation>
        </message>
    </context>
    <context>
        <name>Attaching</name>
        <message>
            <source>A message takes up to {0} documents: attach the folder that they are in.</source>
            <translation>1つのメッセージに添付できる文書は{0}件までです。文書の入ったフォルダーを添付してください。</translation>
        </message>
    </context>
    <context>
        <name>AttachmentChip</name>
        <message>
            <source>Remove {0}</source>
            <translation>{0}を削除</translation>
        </message>
    </context>
    <context>
        <name>Batch</name>
        <message>
            <source>Row {0}</source>
            <translation>行 {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} トークン</translation>
        </message>
        <message>
            <source>The row {0}.</source>
            <translation>この行: {0}。</translation>
        </message>
        <message>
            <source>(an empty answer)</source>
            <translation>（空の回答）</translation>
        </message>
        <message>
            <source>Files of prompts</source>
            <translation>プロンプトのファイル</translation>
        </message>
        <message>
            <source>tomorrow {0}</source>
            <translation>明日 {0}</translation>
        </message>
        <message>
            <source>d MMM</source>
            <translation>M月d日</translation>
        </message>
        <message>
            <source>d MMM yyyy</source>
            <translation>yyyy年M月d日</translation>
        </message>
        <message>
            <source>One row</source>
            <translation>1行</translation>
        </message>
        <message>
            <source>{0} to {1} tokens/s</source>
            <translation>{0}～{1} トークン/秒</translation>
        </message>
        <message>
            <source>done between {0} and {1}</source>
            <translation>{0}～{1}に完了</translation>
        </message>
        <message>
            <source>done at about {0}</source>
            <translation>{0}頃に完了</translation>
        </message>
        <message>
            <source>Measured on the trial rows, ±{0}.</source>
            <translation>試した行での実測、±{0}。</translation>
        </message>
        <message>
            <source>done by {0} even if every answer takes all {1} tokens</source>
            <translation>すべての回答が{1}トークンを使い切っても{0}までに完了</translation>
        </message>
        <message>
            <source>Predicted, ±{0}; a trial of the first rows is more exact.</source>
            <translation>予測、±{0}。最初の数行を試すとより正確になります。</translation>
        </message>
        <message>
            <source>One row at a time: {0} tokens/s.</source>
            <translation>1行ずつ: {0} トークン/秒。</translation>
        </message>
        <message>
            <source>Context of these rows: up to {0} of memory.</source>
            <translation>これらの行のコンテキスト：メモリ最大 {0}。</translation>
        </message>
        <message>
            <source>Rows are answered one at a time</source>
            <translation>行を1つずつ回答します</translation>
        </message>
        <message>
            <source>{0} rows share each load of a layer's weights</source>
            <translation>レイヤーの重みを1回読むごとに{0}行で共有します</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, slower than the {0} to {1} predicted: other programs may be busy, or rows longer than the first ones. The time left is based on the measured rate.</source>
            <translation>実測は{2} トークン/秒で、予測の{0}～{1}より遅くなっています。ほかのプログラムが動いているか、行が最初のものより長いのかもしれません。残り時間は実測に基づきます。</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, faster than the {0} to {1} predicted. The time left is based on the measured rate.</source>
            <translation>実測は{2} トークン/秒で、予測の{0}～{1}より速くなっています。残り時間は実測に基づきます。</translation>
        </message>
        <message>
            <source>Expected: {0} to {1} tokens/s.</source>
            <translation>見込み: {0}～{1} トークン/秒。</translation>
        </message>
        <message>
            <source>Limited by CPU compute.</source>
            <translation>CPUの演算性能が上限です。</translation>
        </message>
        <message>
            <source>Limited by reading weights from RAM.</source>
            <translation>RAMからの重みの読み出しが上限です。</translation>
        </message>
        <message>
            <source>Limited by attention on the CPU.</source>
            <translation>CPUでのアテンションが上限です。</translation>
        </message>
        <message>
            <source>Limited by reading experts from disk.</source>
            <translation>ディスクからのエキスパートの読み出しが上限です。</translation>
        </message>
        <message>
            <source>Limited by the link to the card.</source>
            <translation>グラフィックスカードとの接続が上限です。</translation>
        </message>
        <message>
            <source>Limited by GPU compute.</source>
            <translation>GPUの演算性能が上限です。</translation>
        </message>
        <message>
            <source>running</source>
            <translation>実行中</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>待機中</translation>
        </message>
        <message>
            <source>waiting, place {0}</source>
            <translation>待機中（{0}番目）</translation>
        </message>
        <message>
            <source>stopping</source>
            <translation>停止中</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>一時停止中</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>done</source>
            <translation>完了</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失敗</translation>
        </message>
        <message>
            <source>runs elsewhere</source>
            <translation>別の場所で実行中</translation>
        </message>
        <message>
            <source>1 row done</source>
            <translation>1行完了</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows done</source>
            <translation>
                <numerusform>{0}行完了</numerusform>
            </translation>
        </message>
        <message numerus="yes">
            <source>{0} of {1} rows</source>
            <translation>
                <numerusform>{1}行中{0}行</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} failed</source>
            <translation>失敗 {0}</translation>
        </message>
        <message>
            <source>{0} cut off</source>
            <translation>途切れ {0}</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} トークン/秒</translation>
        </message>
        <message>
            <source>done by {0} at the latest</source>
            <translation>遅くとも{0}に完了</translation>
        </message>
        <message>
            <source>Shares the engine with your chat until the answer is complete.</source>
            <translation>回答が終わるまで、チャットとエンジンを共有します。</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>ファイルを読み込んでいます…</translation>
        </message>
        <message>
            <source>Starts when the engine is ready.</source>
            <translation>エンジンの準備ができ次第始まります。</translation>
        </message>
        <message>
            <source>Starts when a job before it is done and a model is loaded.</source>
            <translation>前のジョブが終わり、モデルが読み込まれると始まります。</translation>
        </message>
        <message>
            <source>Saving finished rows…</source>
            <translation>完了した行を保存しています…</translation>
        </message>
        <message>
            <source>Finishing the current layer and saving finished rows…</source>
            <translation>現在のレイヤーを終え、完了した行を保存しています…</translation>
        </message>
        <message>
            <source>Another program is working on this job, such as “switchyard batch”.</source>
            <translation>「switchyard batch」など、別のプログラムがこのジョブを処理しています。</translation>
        </message>
        <message>
            <source>All rows are in {0}.</source>
            <translation>すべての行は{0}にあります。</translation>
        </message>
        <message>
            <source>{0} says why rows failed.</source>
            <translation>行が失敗した理由は{0}にあります。</translation>
        </message>
        <message>
            <source>Column “problem” says why rows failed.</source>
            <translation>行が失敗した理由は「problem」列にあります。</translation>
        </message>
        <message>
            <source>Stopped: the answered rows are in {0}.</source>
            <translation>停止しました。回答済みの行は{0}にあります。</translation>
        </message>
        <message>
            <source>Resume continues where it stopped.</source>
            <translation>「再開」で続きから実行します。</translation>
        </message>
        <message>
            <source>{0} min {1} s</source>
            <translation>{0}分{1}秒</translation>
        </message>
        <message>
            <source>{0} tokens in {1}, {2} tokens/s.</source>
            <translation>{1}で{0}トークン、{2} トークン/秒。</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0}秒</translation>
        </message>
        <message>
            <source>Connecting to the Ray cluster…</source>
            <translation>Rayクラスターに接続しています…</translation>
        </message>
        <message>
            <source>Asking the servers which models they have…</source>
            <translation>サーバーにモデルを問い合わせています…</translation>
        </message>
        <message>
            <source>Rows are sent to {0}.</source>
            <translation>行は{0}に送信されます。</translation>
        </message>
        <message>
            <source>Rows are sent to {0} on this PC; no text leaves it.</source>
            <translation>行はこのPC上の{0}に送信されます。テキストはPCの外に出ません。</translation>
        </message>
        <message>
            <source> and to </source>
            <translation>、</translation>
        </message>
        <message>
            <source>Chats go first on this PC.</source>
            <translation>このPCではチャットが優先されます。</translation>
        </message>
        <message>
            <source>This PC answers your chat first.</source>
            <translation>このPCはまずチャットに回答します。</translation>
        </message>
        <message>
            <source>The first rows are being answered.</source>
            <translation>最初の行に回答しています。</translation>
        </message>
        <message>
            <source>Another job shares the engine.</source>
            <translation>別のジョブとエンジンを共有しています。</translation>
        </message>
        <message>
            <source>{0} other jobs share the engine.</source>
            <translation>ほかの{0}件のジョブとエンジンを共有しています。</translation>
        </message>
        <message>
            <source>Chats go on beside it.</source>
            <translation>チャットも並行して使えます。</translation>
        </message>
        <message>
            <source>complete</source>
            <translation>完了</translation>
        </message>
        <message>
            <source>cut off</source>
            <translation>途切れ</translation>
        </message>
        <message>
            <source>context full</source>
            <translation>コンテキスト満杯</translation>
        </message>
        <message>
            <source>No text leaves this PC.</source>
            <translation>テキストはこのPCの外に出ません。</translation>
        </message>
        <message>
            <source>The rows are sent to a server on this PC; no text leaves it.</source>
            <translation>行はこのPC上のサーバーに送信されます。テキストはPCの外に出ません。</translation>
        </message>
        <message>
            <source>The text of every row may be sent to {0}.</source>
            <translation>各行のテキストが{0}に送信されることがあります。</translation>
        </message>
        <message>
            <source>that this PC belongs to</source>
            <translation>（このPCが属するもの）</translation>
        </message>
        <message>
            <source>at {0}</source>
            <translation>（{0}）</translation>
        </message>
        <message>
            <source>The text of every row is sent to the nodes of the Ray cluster {0}.</source>
            <translation>各行のテキストはRayクラスター{0}のノードに送信されます。</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>このPC</translation>
        </message>
        <message>
            <source>Not asked: {0}</source>
            <translation>問い合わせていません: {0}</translation>
        </message>
        <message>
            <source>Paused, and asked again later: {0}</source>
            <translation>休止中、あとで再び問い合わせます: {0}</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows at once</source>
            <translation>
                <numerusform>同時に{0}行</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row at once</source>
            <translation>同時に1行</translation>
        </message>
        <message numerus="yes">
            <source>Measured there on {0} rows: {1} s for a row, {2} tokens read and {3} written.</source>
            <translation>
                <numerusform>そこで{0}行を測定: 1行あたり{1}秒、読み取り{2}トークン、生成{3}トークン。</numerusform>
            </translation>
        </message>
        <message>
            <source>All rows take {0} min at most; asked at once, they take less.</source>
            <translation>全行で長くても{0}分かかります。同時に問い合わせればより短くなります。</translation>
        </message>
        <message>
            <source>They cost about {0}.</source>
            <translation>費用は約{0}です。</translation>
        </message>
        <message>
            <source>{0} row took {1} s, at {2} tokens/s.</source>
            <translation>{0}行に{1}秒、{2} トークン/秒。</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows took {1} s, at {2} tokens/s.</source>
            <translation>
                <numerusform>{0}行に{1}秒、{2} トークン/秒。</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>BatchHead</name>
        <message>
            <source>Batch</source>
            <translation>バッチ</translation>
        </message>
        <message>
            <source>Retry failed</source>
            <translation>失敗を再試行</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>一時停止</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>再開</translation>
        </message>
        <message>
            <source>Open result</source>
            <translation>結果を開く</translation>
        </message>
        <message>
            <source>More</source>
            <translation>その他</translation>
        </message>
        <message>
            <source>New job</source>
            <translation>新しいジョブ</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>フォルダーで表示</translation>
        </message>
        <message>
            <source>Stop and keep answers</source>
            <translation>停止して回答を残す</translation>
        </message>
        <message>
            <source>Start over…</source>
            <translation>最初からやり直す…</translation>
        </message>
        <message>
            <source>Move up in queue</source>
            <translation>順番を前へ</translation>
        </message>
        <message>
            <source>Move down in queue</source>
            <translation>順番を後ろへ</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>一覧から外す</translation>
        </message>
        <message>
            <source>From a file…</source>
            <translation>ファイルから…</translation>
        </message>
        <message>
            <source>From a folder…</source>
            <translation>フォルダーから…</translation>
        </message>
    </context>
    <context>
        <name>BatchHint</name>
        <message>
            <source>Show job</source>
            <translation>ジョブを表示</translation>
        </message>
        <message>
            <source>The engine stopped, so the batch job is paused; no answered row is lost.</source>
            <translation>エンジンが停止したため、バッチジョブは一時停止中です。回答済みの行は失われていません。</translation>
        </message>
        <message>
            <source>The batch job{0} shares the engine with your chat: both are slower until the answer is complete.</source>
            <translation>バッチジョブ{0}がチャットとエンジンを共有しています。回答が終わるまで両方とも遅くなります。</translation>
        </message>
        <message>
            <source>A batch job is running{0}. Your chats share the engine with it and come first.</source>
            <translation>バッチジョブを実行中です{0}。エンジンを共有しますが、チャットが優先されます。</translation>
        </message>
    </context>
    <context>
        <name>BatchJobs</name>
        <message>
            <source>Switchyard was closed before the job started.</source>
            <translation>ジョブが始まる前にSwitchyardが終了しました。</translation>
        </message>
        <message>
            <source>Switchyard was closed while the job ran; no answered row is lost.</source>
            <translation>ジョブの実行中にSwitchyardが終了しました。回答済みの行は失われていません。</translation>
        </message>
        <message>
            <source>The engine was needed for something else, such as another model; no answered row is lost.</source>
            <translation>別のモデルなど、ほかの用途にエンジンが必要になりました。回答済みの行は失われていません。</translation>
        </message>
        <message>
            <source>The list of jobs could not be saved ({0}).</source>
            <translation>ジョブの一覧を保存できませんでした（{0}）。</translation>
        </message>
    </context>
    <context>
        <name>BatchPage</name>
        <message>
            <source>Batch</source>
            <translation>バッチ</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Your chat's prompt is ready: choose the file whose rows it is to be asked of.</source>
            <translation>チャットのプロンプトの準備ができました。各行に使うファイルを選んでください。</translation>
        </message>
        <message>
            <source>{0} has an unsupported file type: use txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx or html, or a folder of such files.</source>
            <translation>{0}の形式には対応していません。txt、md、csv、tsv、jsonl、parquet、xlsx、pdf、docx、html、またはそれらの入ったフォルダーをお使いください。</translation>
        </message>
        <message numerus="yes">
            <source>{0} more after this one</source>
            <translation>
                <numerusform>このあと{0}件</numerusform>
            </translation>
        </message>
        <message>
            <source>Another job is writing {0}: choose another result file.</source>
            <translation>別のジョブが{0}に書き込んでいます。別の結果ファイルを選んでください。</translation>
        </message>
        <message>
            <source>{0} already exists.</source>
            <translation>{0}はすでにあります。</translation>
        </message>
        <message>
            <source>Replacing it deletes the answers in it. To keep them, choose another name.</source>
            <translation>置き換えると中の回答は削除されます。残すには別の名前を選んでください。</translation>
        </message>
        <message>
            <source>Replace it</source>
            <translation>置き換える</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>戻る</translation>
        </message>
        <message>
            <source>Pause the job before you remove it from the list.</source>
            <translation>一覧から外す前にジョブを一時停止してください。</translation>
        </message>
        <message>
            <source>{0} was removed from the list; its result file stays.</source>
            <translation>{0}を一覧から外しました。結果ファイルは残ります。</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>元に戻す</translation>
        </message>
        <message>
            <source>Start this job over?</source>
            <translation>このジョブを最初からやり直しますか?</translation>
        </message>
        <message>
            <source>Its answers are deleted, and its result file is replaced when it is done.</source>
            <translation>回答は削除され、完了時に結果ファイルが置き換えられます。</translation>
        </message>
        <message>
            <source>Start over</source>
            <translation>最初からやり直す</translation>
        </message>
        <message>
            <source>1 row was</source>
            <translation>1行は</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows were</source>
            <translation>
                <numerusform>{0}行は</numerusform>
            </translation>
        </message>
        <message>
            <source>This job began with {0}; now {1} is loaded.</source>
            <translation>このジョブは{0}で始まりましたが、現在は{1}が読み込まれています。</translation>
        </message>
        <message>
            <source>{0} answered with the first. Load it to resume; chats then use it too. Starting over deletes those answers.</source>
            <translation>{0}最初のモデルで回答されました。再開するにはそのモデルを読み込みます（チャットでも使われます）。最初からやり直すと、それらの回答は削除されます。</translation>
        </message>
        <message>
            <source>Load it and resume</source>
            <translation>読み込んで再開</translation>
        </message>
        <message>
            <source>{0} does not exist yet: it is written when the job is done, paused or stopped.</source>
            <translation>{0}はまだありません。ジョブの完了時、一時停止時、停止時に書き込まれます。</translation>
        </message>
        <message>
            <source>Choose a file of prompts</source>
            <translation>プロンプトのファイルを選択</translation>
        </message>
        <message>
            <source>Folder of prompts</source>
            <translation>プロンプトのフォルダー</translation>
        </message>
    </context>
    <context>
        <name>Cache</name>
        <message>
            <source>random</source>
            <translation>ランダム</translation>
        </message>
        <message>
            <source>static popularity</source>
            <translation>固定の人気順</translation>
        </message>
        <message>
            <source>Evicts the least recently used expert.</source>
            <translation>最も長く使われていないエキスパートを追い出します。</translation>
        </message>
        <message>
            <source>Evicts the least frequently used expert.</source>
            <translation>使用頻度が最も低いエキスパートを追い出します。</translation>
        </message>
        <message>
            <source>Evicts an expert that is used rarely and not recently.</source>
            <translation>使用が少なく、最近使われていないエキスパートを追い出します。</translation>
        </message>
        <message>
            <source>Evicts the oldest expert.</source>
            <translation>最も古いエキスパートを追い出します。</translation>
        </message>
        <message>
            <source>Evicts a random expert.</source>
            <translation>ランダムにエキスパートを追い出します。</translation>
        </message>
        <message>
            <source>Keeps the most popular experts.</source>
            <translation>人気の高いエキスパートを残します。</translation>
        </message>
        <message>
            <source>previous token</source>
            <translation>直前のトークン</translation>
        </message>
        <message>
            <source>next layer's gate</source>
            <translation>次のレイヤーのゲート</translation>
        </message>
        <message>
            <source>correlation table</source>
            <translation>相関テーブル</translation>
        </message>
        <message>
            <source>trained network</source>
            <translation>学習済みネットワーク</translation>
        </message>
    </context>
    <context>
        <name>CacheCard</name>
        <message>
            <source>Cache</source>
            <translation>キャッシュ</translation>
        </message>
        <message>
            <source>Expert cache</source>
            <translation>エキスパートキャッシュ</translation>
        </message>
        <message>
            <source>The cache keeps the most used experts where they can be reached fastest. A hit is an expert that was already there when it was needed; a miss has to be copied from slower memory first, or computed there.</source>
            <translation>キャッシュは、よく使われるエキスパートを最も速く読める場所に置きます。必要なときにすでにあればヒット、なければミスで、遅いメモリからコピーするか、その場で計算する必要があります。</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Show this tier's size</source>
            <translation>この階層のサイズを表示</translation>
        </message>
        <message>
            <source>nothing to cache</source>
            <translation>キャッシュするものがありません</translation>
        </message>
        <message>
            <source>policy {0}, adopted</source>
            <translation>方式 {0}（採用中）</translation>
        </message>
        <message>
            <source>policy {0}</source>
            <translation>方式 {0}</translation>
        </message>
        <message>
            <source>Chosen while running, by each policy's hit rate</source>
            <translation>各方式のヒット率に応じて実行中に選ばれます</translation>
        </message>
        <message>
            <source>Here a miss costs no more than a hit, so another size would not be faster.</source>
            <translation>ここではミスのコストがヒットと変わらないため、サイズを変えても速くなりません。</translation>
        </message>
        <message>
            <source>Load a model with experts to see its hit rate and the effect of other cache sizes.</source>
            <translation>エキスパートのあるモデルを読み込むと、ヒット率とキャッシュサイズの効果がわかります。</translation>
        </message>
        <message>
            <source>All experts are in the graphics card's memory: every one is a hit, and nothing is cached.</source>
            <translation>すべてのエキスパートがグラフィックスカードのメモリにあります。すべてヒットとなり、キャッシュは使われません。</translation>
        </message>
        <message>
            <source>All experts are in RAM and computed by the CPU, so there is nothing to cache.</source>
            <translation>すべてのエキスパートがRAMにあり、CPUで計算されるため、キャッシュするものがありません。</translation>
        </message>
        <message>
            <source>This model has no experts, so there is nothing to cache.</source>
            <translation>このモデルにはエキスパートがないため、キャッシュするものがありません。</translation>
        </message>
    </context>
    <context>
        <name>CallRow</name>
        <message>
            <source>The model wants to call {0}.</source>
            <translation>モデルが {0} を呼び出そうとしています。</translation>
        </message>
        <message>
            <source>The model wants to call {0} of the server {1}.</source>
            <translation>モデルがサーバー {1} の {0} を呼び出そうとしています。</translation>
        </message>
        <message>
            <source>Allow once</source>
            <translation>今回だけ許可</translation>
        </message>
        <message>
            <source>Allow in this chat</source>
            <translation>このチャットで許可</translation>
        </message>
        <message>
            <source>Always allow</source>
            <translation>常に許可</translation>
        </message>
        <message>
            <source>Deny</source>
            <translation>拒否</translation>
        </message>
        <message>
            <source>Fold the call</source>
            <translation>呼び出しを折りたたむ</translation>
        </message>
        <message>
            <source>Show arguments and result</source>
            <translation>引数と結果を表示</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>展開</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>折りたたみ</translation>
        </message>
        <message>
            <source>Arguments</source>
            <translation>引数</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>結果</translation>
        </message>
    </context>
    <context>
        <name>Catalogue</name>
        <message>
            <source>Strong at reasoning, mathematics and code, with very long documents; for machines with a lot of memory.</source>
            <translation>推論、数学、コードに強く、非常に長い文書も扱えます。メモリの多いマシン向け。</translation>
        </message>
        <message>
            <source>English, Chinese and many others</source>
            <translation>英語、中国語ほか多数</translation>
        </message>
        <message>
            <source>Reasons step by step before it answers: good at mathematics, code and using tools.</source>
            <translation>段階的に考えてから答えます。数学、コード、ツールの利用が得意。</translation>
        </message>
        <message>
            <source>English, and others less well</source>
            <translation>英語（ほかはやや不得手）</translation>
        </message>
        <message>
            <source>The strongest all-round model for machines with 96 GB or more: knowledge, code and long documents.</source>
            <translation>96 GB以上のマシン向けの最も強力な万能モデル。知識、コード、長い文書。</translation>
        </message>
        <message>
            <source>over 100 languages</source>
            <translation>100以上の言語</translation>
        </message>
        <message>
            <source>Even-tempered chat, writing and code in European languages, with long documents.</source>
            <translation>ヨーロッパの言語での安定した会話、文章、コード。長い文書も可。</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian and others</source>
            <translation>英語、フランス語、ドイツ語、スペイン語、イタリア語ほか</translation>
        </message>
        <message>
            <source>Good at writing code over many steps and at using tools; can think before it answers.</source>
            <translation>多段階のコード作成とツールの利用が得意。答える前に考えることもできます。</translation>
        </message>
        <message>
            <source>English and Chinese</source>
            <translation>英語、中国語</translation>
        </message>
        <message>
            <source>Much knowledge for its speed; answers directly, and keeps its pace with very long texts.</source>
            <translation>速さの割に知識が豊富。すぐに答え、非常に長いテキストでも速さが落ちません。</translation>
        </message>
        <message>
            <source>The best all-round choice for PCs with 32 GB: chat, code, reasoning and long documents.</source>
            <translation>32 GBのPCに最適な万能モデル。会話、コード、推論、長い文書。</translation>
        </message>
        <message>
            <source>Natural writing in very many languages, general knowledge and summaries.</source>
            <translation>非常に多くの言語での自然な文章、一般知識、要約。</translation>
        </message>
        <message>
            <source>over 140 languages</source>
            <translation>140以上の言語</translation>
        </message>
        <message>
            <source>Reasons before it answers; good at mathematics, science and following instructions exactly.</source>
            <translation>考えてから答えます。数学、科学、指示の正確な遂行が得意。</translation>
        </message>
        <message>
            <source>English, and five others less well</source>
            <translation>英語（ほかの5言語はやや不得手）</translation>
        </message>
        <message>
            <source>Writes code over many steps and uses tools well for its size.</source>
            <translation>多段階のコードを書き、サイズの割にツールをうまく使います。</translation>
        </message>
        <message>
            <source>Reasons step by step and is quick: good at mathematics and code on PCs with 16 GB.</source>
            <translation>段階的に考え、しかも高速。16 GBのPCでの数学とコードに。</translation>
        </message>
        <message>
            <source>Made for programming: writes, explains and changes code in many languages.</source>
            <translation>プログラミング用。多くの言語でコードを書き、説明し、修正します。</translation>
        </message>
        <message>
            <source>A quick all-rounder that answers directly: chat, translation, summaries.</source>
            <translation>すぐに答える高速な万能モデル。会話、翻訳、要約。</translation>
        </message>
        <message>
            <source>Careful writing in European languages; uses every weight for every token, so it wants a large graphics card.</source>
            <translation>ヨーロッパの言語での丁寧な文章。トークンごとに全重みを使うため、大容量のグラフィックスカードが必要。</translation>
        </message>
        <message>
            <source>Follows instructions and fills in forms and JSON reliably; little memory for long texts.</source>
            <translation>指示に従い、フォームやJSONを確実に埋めます。長いテキストの記憶は苦手。</translation>
        </message>
        <message>
            <source>English, German, Spanish, French, Japanese and seven others</source>
            <translation>英語、ドイツ語、スペイン語、フランス語、日本語ほか7言語</translation>
        </message>
        <message>
            <source>General knowledge and writing in Chinese and English at good speed.</source>
            <translation>中国語と英語の一般知識と文章。速度も良好。</translation>
        </message>
        <message>
            <source>Chinese and English</source>
            <translation>中国語、英語</translation>
        </message>
        <message>
            <source>Pleasant writing in many languages; for graphics cards with 12 GB.</source>
            <translation>多くの言語での心地よい文章。12 GBのグラフィックスカード向け。</translation>
        </message>
        <message>
            <source>A solid small model that can think before it answers; for graphics cards with 8 GB.</source>
            <translation>答える前に考えることもできる堅実な小型モデル。8 GBのグラフィックスカード向け。</translation>
        </message>
        <message>
            <source>An older model, known from many papers: good for comparisons.</source>
            <translation>多くの論文で知られる古めのモデル。比較に便利。</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian</source>
            <translation>英語、フランス語、ドイツ語、スペイン語、イタリア語</translation>
        </message>
        <message>
            <source>Reasoning and mathematics from textbook-like training; an older model.</source>
            <translation>教科書のような学習による推論と数学。古めのモデル。</translation>
        </message>
        <message>
            <source>English and 22 others</source>
            <translation>英語ほか22言語</translation>
        </message>
        <message>
            <source>Very quick even without a graphics card: summaries, extraction, simple chat.</source>
            <translation>グラフィックスカードなしでも非常に高速。要約、抽出、簡単な会話。</translation>
        </message>
        <message>
            <source>English, Chinese, German, Spanish, French, Japanese and others</source>
            <translation>英語、中国語、ドイツ語、スペイン語、フランス語、日本語ほか</translation>
        </message>
        <message>
            <source>Small and quick: forms, JSON, summaries and tools on old laptops.</source>
            <translation>小型で高速。古いノートPCでのフォーム、JSON、要約、ツールに。</translation>
        </message>
        <message>
            <source>Surprisingly able for its size; for small graphics cards and long texts.</source>
            <translation>サイズの割に驚くほど有能。小容量のグラフィックスカードと長いテキストに。</translation>
        </message>
        <message>
            <source>Small, with a good sense for numbers and instructions.</source>
            <translation>小型で、数値や指示の扱いが得意。</translation>
        </message>
        <message>
            <source>Small and open in every respect: weights, data and recipe.</source>
            <translation>小型で、重み、データ、手順のすべてがオープン。</translation>
        </message>
        <message>
            <source>English, French, Spanish, German, Italian, Portuguese</source>
            <translation>英語、フランス語、スペイン語、ドイツ語、イタリア語、ポルトガル語</translation>
        </message>
        <message>
            <source>Open in every respect, and very quick; short texts only.</source>
            <translation>すべてがオープンで非常に高速。短いテキストのみ。</translation>
        </message>
        <message>
            <source>English</source>
            <translation>英語</translation>
        </message>
    </context>
    <context>
        <name>Chat</name>
        <message>
            <source>The model wrote no summary: leave the oldest turns out, or try another model.</source>
            <translation>モデルが要約を書きませんでした。最も古いやり取りを除外するか、別のモデルをお試しください。</translation>
        </message>
        <message>
            <source>Attach a folder</source>
            <translation>フォルダーを添付</translation>
        </message>
        <message>
            <source>Pictures ({0})</source>
            <translation>画像 ({0})</translation>
        </message>
        <message>
            <source>All files (*)</source>
            <translation>すべてのファイル (*)</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>ファイルを添付</translation>
        </message>
        <message>
            <source>Markdown and JSON of every chat (*.zip)</source>
            <translation>全チャットのMarkdownとJSON (*.zip)</translation>
        </message>
        <message>
            <source>Markdown, as shown (*.md)</source>
            <translation>Markdown、表示どおり (*.md)</translation>
        </message>
        <message>
            <source>PDF, as shown (*.pdf)</source>
            <translation>PDF、表示どおり (*.pdf)</translation>
        </message>
        <message>
            <source>Web page, as shown (*.html)</source>
            <translation>Webページ、表示どおり (*.html)</translation>
        </message>
        <message>
            <source>JSON, with all versions and branches (*.json)</source>
            <translation>JSON、全バージョンと分岐を含む (*.json)</translation>
        </message>
        <message>
            <source>Switchyard chats</source>
            <translation>Switchyardのチャット</translation>
        </message>
        <message>
            <source>Export</source>
            <translation>エクスポート</translation>
        </message>
        <message>
            <source>Chats of Switchyard, ChatGPT and LM Studio (*.zip *.json *.md *.markdown)</source>
            <translation>Switchyard、ChatGPT、LM Studioのチャット (*.zip *.json *.md *.markdown)</translation>
        </message>
        <message>
            <source>Import chats</source>
            <translation>チャットをインポート</translation>
        </message>
        <message>
            <source>The import was cancelled; what was imported until then stays.</source>
            <translation>インポートをキャンセルしました。それまでに取り込んだものは残ります。</translation>
        </message>
        <message>
            <source>1 chat</source>
            <translation>1件のチャット</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats</source>
            <translation>
                <numerusform>{0}件のチャット</numerusform>
            </translation>
        </message>
        <message>
            <source>1 that was here has new messages.</source>
            <translation>既存の1件に新しいメッセージがあります。</translation>
        </message>
        <message numerus="yes">
            <source>{0} that were here have new messages.</source>
            <translation>
                <numerusform>既存の{0}件に新しいメッセージがあります。</numerusform>
            </translation>
        </message>
        <message>
            <source>1 was already here and is unchanged.</source>
            <translation>1件はすでにあり、変更ありません。</translation>
        </message>
        <message numerus="yes">
            <source>{0} were already here and are unchanged.</source>
            <translation>
                <numerusform>{0}件はすでにあり、変更ありません。</numerusform>
            </translation>
        </message>
        <message>
            <source>1 chat is damaged and could not be read.</source>
            <translation>1件のチャットが壊れており、読み込めませんでした。</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats are damaged and could not be read.</source>
            <translation>
                <numerusform>{0}件のチャットが壊れており、読み込めませんでした。</numerusform>
            </translation>
        </message>
        <message>
            <source>The file ends in the middle: what comes after that is not in it.</source>
            <translation>ファイルが途中で終わっています。その先は含まれていません。</translation>
        </message>
        <message>
            <source>Left out: {0}.</source>
            <translation>除外: {0}。</translation>
        </message>
        <message>
            <source>{0} was not imported: {1}.</source>
            <translation>{0}は取り込まれませんでした: {1}。</translation>
        </message>
        <message numerus="yes">
            <source>Neither were {0} other files.</source>
            <translation>
                <numerusform>ほかの{0}件のファイルも同様です。</numerusform>
            </translation>
        </message>
        <message>
            <source>Imported: {0}.</source>
            <translation>インポート済み: {0}。</translation>
        </message>
        <message>
            <source>tool calls ({0})</source>
            <translation>ツールの呼び出し（{0}）</translation>
        </message>
        <message>
            <source>pictures ({0})</source>
            <translation>画像（{0}）</translation>
        </message>
        <message>
            <source>attached files ({0})</source>
            <translation>添付ファイル（{0}）</translation>
        </message>
        <message>
            <source>settings of single chats ({0})</source>
            <translation>チャットごとの設定（{0}）</translation>
        </message>
        <message>
            <source>chats without messages ({0})</source>
            <translation>メッセージのないチャット（{0}）</translation>
        </message>
        <message>
            <source>parts of an unknown kind ({0})</source>
            <translation>不明な種類の部分（{0}）</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>新しいチャット</translation>
        </message>
        <message>
            <source>Scratch chat</source>
            <translation>一時チャット</translation>
        </message>
        <message>
            <source>Scratch, not stored</source>
            <translation>一時（保存されません）</translation>
        </message>
        <message>
            <source>Folders</source>
            <translation>フォルダー</translation>
        </message>
        <message>
            <source>Pinned</source>
            <translation>ピン留め</translation>
        </message>
        <message>
            <source>Today</source>
            <translation>今日</translation>
        </message>
        <message>
            <source>Yesterday</source>
            <translation>昨日</translation>
        </message>
        <message>
            <source>Previous 7 days</source>
            <translation>過去7日間</translation>
        </message>
        <message>
            <source>Older</source>
            <translation>それ以前</translation>
        </message>
        <message>
            <source>Found</source>
            <translation>検索結果</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>以前のやり取りを要約</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>モデルが要約し、以後はその要約を読みます。</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>最も古いものを除外</translation>
        </message>
        <message>
            <source>The model reads nothing of them; they are kept.</source>
            <translation>モデルはこれらを読みません。内容は保持されます。</translation>
        </message>
        <message>
            <source>Ask in a new chat</source>
            <translation>新しいチャットで質問</translation>
        </message>
        <message>
            <source>Send anyway</source>
            <translation>それでも送信</translation>
        </message>
        <message>
            <source>Not now</source>
            <translation>後で</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>The earlier turns were not folded: {0}</source>
            <translation>以前のやり取りは要約されませんでした: {0}</translation>
        </message>
        <message>
            <source>Delete its chat, too</source>
            <translation>中のチャットも削除</translation>
        </message>
        <message numerus="yes">
            <source>Delete its {0} chats, too</source>
            <translation>
                <numerusform>中の{0}件のチャットも削除</numerusform>
            </translation>
        </message>
        <message>
            <source>Delete the folder “{0}”?</source>
            <translation>フォルダー「{0}」を削除しますか?</translation>
        </message>
        <message>
            <source>Its chats can stay, outside of any folder. Either way you can undo it.</source>
            <translation>中のチャットはフォルダーの外に残せます。どちらの場合も元に戻せます。</translation>
        </message>
        <message>
            <source>Delete only the folder</source>
            <translation>フォルダーだけを削除</translation>
        </message>
        <message>
            <source>The folder “{0}” was deleted.</source>
            <translation>フォルダー「{0}」を削除しました。</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>新しいフォルダー</translation>
        </message>
        <message>
            <source>New folder {0}</source>
            <translation>新しいフォルダー {0}</translation>
        </message>
        <message>
            <source>The message was deleted.</source>
            <translation>メッセージを削除しました。</translation>
        </message>
        <message>
            <source>The message was changed.</source>
            <translation>メッセージを変更しました。</translation>
        </message>
        <message>
            <source>Earlier turns are folded into a summary.</source>
            <translation>以前のやり取りを要約しました。</translation>
        </message>
        <message>
            <source>The oldest turns are left out of what the model reads.</source>
            <translation>最も古いやり取りはモデルに読まれなくなりました。</translation>
        </message>
        <message>
            <source>The turns are sent as they are again.</source>
            <translation>やり取りを再びそのまま送信します。</translation>
        </message>
        <message>
            <source>The summary was changed.</source>
            <translation>要約を変更しました。</translation>
        </message>
        <message>
            <source>An answer is being written here: wait for it, or stop it first.</source>
            <translation>ここでは回答を生成中です。完了を待つか、先に停止してください。</translation>
        </message>
        <message>
            <source>waiting for the engine, which is not running</source>
            <translation>エンジン待ち（動いていません）</translation>
        </message>
        <message>
            <source>waiting for a model: none is loaded</source>
            <translation>モデル待ち（読み込まれていません）</translation>
        </message>
        <message>
            <source>waiting for the model to load</source>
            <translation>モデルの読み込み待ち</translation>
        </message>
        <message>
            <source>searching the documents</source>
            <translation>文書を調べています</translation>
        </message>
        <message>
            <source>starting the servers with the tools</source>
            <translation>ツールのサーバーを起動しています</translation>
        </message>
        <message>
            <source>waiting for you to allow a call</source>
            <translation>呼び出しの許可を待っています</translation>
        </message>
        <message>
            <source>waiting for a tool</source>
            <translation>ツールを待っています</translation>
        </message>
        <message>
            <source>waiting for another answer</source>
            <translation>別の回答を待っています</translation>
        </message>
        <message>
            <source>waiting for the first token from the other server</source>
            <translation>ほかのサーバーの最初のトークンを待っています</translation>
        </message>
        <message>
            <source>reading the prompt</source>
            <translation>プロンプトを読んでいます</translation>
        </message>
        <message>
            <source>thinking</source>
            <translation>思考中</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>生成中</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} トークン/秒</translation>
        </message>
        <message>
            <source>first token {0} s</source>
            <translation>最初のトークンまで{0}秒</translation>
        </message>
        <message>
            <source>1 token</source>
            <translation>1 トークン</translation>
        </message>
        <message numerus="yes">
            <source>{0} tokens</source>
            <translation>
                <numerusform>{0} トークン</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of {1} drafted tokens accepted</source>
            <translation>ドラフト{1}トークン中{0}を採用</translation>
        </message>
        <message>
            <source>reached the limit</source>
            <translation>上限に到達</translation>
        </message>
        <message>
            <source>the context is full</source>
            <translation>コンテキストが満杯です</translation>
        </message>
        <message>
            <source>edited</source>
            <translation>編集済み</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>picture read before</source>
            <translation>画像は読み取り済み</translation>
        </message>
        <message>
            <source>picture read in {0} s</source>
            <translation>画像を {0} 秒で読み取り</translation>
        </message>
        <message>
            <source>{0} pictures read in {1} s</source>
            <translation>{0} 枚の画像を {1} 秒で読み取り</translation>
        </message>
        <message>
            <source>{0} pictures read before</source>
            <translation>{0} 枚の画像は読み取り済み</translation>
        </message>
        <message>
            <source>{0} of {1} pictures read before, the others in {2} s</source>
            <translation>{1} 枚中 {0} 枚の画像は読み取り済み、残りは {2} 秒</translation>
        </message>
        <message>
            <source>Thinking… {0}</source>
            <translation>思考中… {0}</translation>
        </message>
        <message>
            <source>Thought</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>Thought for {0}</source>
            <translation>{0}考えました</translation>
        </message>
        <message>
            <source>The answer is incomplete.</source>
            <translation>回答は途中までです。</translation>
        </message>
        <message>
            <source>The text so far is kept.</source>
            <translation>ここまでのテキストは保持されます。</translation>
        </message>
        <message>
            <source>Your message is kept: make room, edit it, or start a new chat.</source>
            <translation>メッセージは保持されています。空きを作るか、編集するか、新しいチャットを始めてください。</translation>
        </message>
        <message>
            <source>The context was full before the answer began: make room, and ask again.</source>
            <translation>回答が始まる前にコンテキストが満杯になりました。空きを作ってから、もう一度質問してください。</translation>
        </message>
        <message>
            <source>It was still thinking when it reached the limit: raise Max tokens, or let it think less.</source>
            <translation>思考中に上限に達しました。「最大トークン数」を増やすか、思考を減らしてください。</translation>
        </message>
        <message>
            <source>The answer ran into the end of the context: make room, and let it continue.</source>
            <translation>回答がコンテキストの終わりに達しました。空きを作ってから続けてください。</translation>
        </message>
        <message>
            <source>{0} tokens of context</source>
            <translation>コンテキスト{0}トークン</translation>
        </message>
        <message>
            <source>for new chats</source>
            <translation>新しいチャット用</translation>
        </message>
        <message>
            <source>sees pictures</source>
            <translation>画像対応</translation>
        </message>
        <message>
            <source>default</source>
            <translation>既定</translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>読み込み済み</translation>
        </message>
        <message>
            <source>measured</source>
            <translation>実測</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>予測</translation>
        </message>
        <message>
            <source>The only model there</source>
            <translation>そこにある唯一のモデル</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>スターターモデル</translation>
        </message>
        <message>
            <source>Sent to {0}, another program on this PC</source>
            <translation>このPCの別のプログラム{0}に送信します</translation>
        </message>
        <message>
            <source>Sent to {0}</source>
            <translation>{0}に送信します</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat stays on this PC.</source>
            <translation>{0}: このチャットで書いた内容はこのPCに留まります。</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat leaves this PC.</source>
            <translation>{0}: このチャットで書いた内容はこのPCの外に送られます。</translation>
        </message>
        <message>
            <source>top-k</source>
            <translation>top-k</translation>
        </message>
        <message>
            <source>min-p</source>
            <translation>min-p</translation>
        </message>
        <message>
            <source>the repetition penalty</source>
            <translation>繰り返しペナルティ</translation>
        </message>
        <message>
            <source>loop guard</source>
            <translation>ループ防止</translation>
        </message>
        <message>
            <source>beam search</source>
            <translation>ビームサーチ</translation>
        </message>
        <message>
            <source>how much to think</source>
            <translation>思考の程度</translation>
        </message>
        <message>
            <source>It does not take this chat's {0}.</source>
            <translation>このチャットの次の設定は使われません: {0}。</translation>
        </message>
        <message>
            <source>{0} of {1} reads text only: choose another model to send pictures.</source>
            <translation>{1}の{0}はテキストのみ読みます。画像を送るには別のモデルを選んでください。</translation>
        </message>
        <message>
            <source>The model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>{0} reads text only.</source>
            <translation>{0} はテキストのみを読み取ります。</translation>
        </message>
        <message>
            <source>No model on this PC sees pictures.</source>
            <translation>この PC には画像を認識できるモデルがありません。</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0}、ほか{1}件</translation>
        </message>
        <message>
            <source>On this PC these see pictures: {0}.</source>
            <translation>この PC で画像を認識できるモデル: {0}。</translation>
        </message>
        <message>
            <source>Your message has about {0} tokens; the model reads {1}. Shorten it.</source>
            <translation>メッセージは約{0}トークンですが、モデルが読むのは{1}です。短くしてください。</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Make room, or ask in a new chat.</source>
            <translation>このメッセージを含めるとチャットは約{0}トークンになりますが、モデルが読むのは{1}です。空きを作るか、新しいチャットで質問してください。</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Ask in a new chat.</source>
            <translation>このメッセージを含めるとチャットは約{0}トークンになりますが、モデルが読むのは{1}です。新しいチャットで質問してください。</translation>
        </message>
        <message>
            <source>This chat takes {0} of the {1} tokens the model reads. Make room before it is full.</source>
            <translation>このチャットは、モデルが読む{1}トークンのうち{0}を使っています。満杯になる前に空きを作ってください。</translation>
        </message>
        <message>
            <source>The context is full: {0} of {1} tokens are taken. Make room, or ask in a new chat.</source>
            <translation>コンテキストが満杯です: {1}トークン中{0}を使用中です。空きを作るか、新しいチャットで質問してください。</translation>
        </message>
        <message>
            <source>The earlier turns are summarised once the model is idle.</source>
            <translation>モデルが空き次第、以前のやり取りを要約します。</translation>
        </message>
        <message>
            <source>Summarising the earlier turns… {0}. Your messages come first.</source>
            <translation>以前のやり取りを要約しています… {0}。メッセージが優先されます。</translation>
        </message>
        <message>
            <source>Reading… {0}</source>
            <translation>読み込み中… {0}</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>読み込み中…</translation>
        </message>
        <message>
            <source>folder</source>
            <translation>フォルダー</translation>
        </message>
        <message>
            <source>file</source>
            <translation>ファイル</translation>
        </message>
        <message>
            <source>This {0} {1}.</source>
            <translation>{0}: {1}。</translation>
        </message>
        <message>
            <source>Not read yet</source>
            <translation>未読</translation>
        </message>
        <message>
            <source>1 file</source>
            <translation>1ファイル</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0}ファイル</numerusform>
            </translation>
        </message>
        <message>
            <source>1 page</source>
            <translation>1ページ</translation>
        </message>
        <message numerus="yes">
            <source>{0} pages</source>
            <translation>
                <numerusform>{0}ページ</numerusform>
            </translation>
        </message>
        <message>
            <source>about {0} tokens</source>
            <translation>約{0}トークン</translation>
        </message>
        <message>
            <source>goes to {0}</source>
            <translation>{0}に送信</translation>
        </message>
        <message>
            <source>page {0}</source>
            <translation>{0}ページ</translation>
        </message>
        <message>
            <source>There was no room for {0} beside this chat: ask in a new chat, or shorten this one.</source>
            <translation>このチャットには{0}を入れる空きがありません。新しいチャットで質問するか、このチャットを短くしてください。</translation>
        </message>
        <message>
            <source>The documents could not be searched ({0}), so the answer is given without them.</source>
            <translation>文書を調べられませんでした（{0}）。文書なしで回答します。</translation>
        </message>
        <message>
            <source>It reads text only: the pictures in this chat are not sent.</source>
            <translation>テキストのみ読むモデルです。このチャットの画像は送信されません。</translation>
        </message>
        <message>
            <source>This model reads text only: the pictures in this chat are not read.</source>
            <translation>このモデルはテキストのみを読み取ります。このチャットの画像は読み取られません。</translation>
        </message>
        <message>
            <source>The server {0} is no longer in the list, and nothing else answers here: choose a model for this chat.</source>
            <translation>サーバー{0}が一覧になく、ほかに回答するものがありません。このチャットのモデルを選んでください。</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1スレッド</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0}スレッド</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>チャット</translation>
        </message>
        <message>
            <source>Please continue.</source>
            <translation>続けてください。</translation>
        </message>
        <message>
            <source>Branch: {0}</source>
            <translation>分岐：{0}</translation>
        </message>
        <message>
            <source>Picture</source>
            <translation>画像</translation>
        </message>
        <message>
            <source>Custom</source>
            <translation>カスタム</translation>
        </message>
        <message>
            <source>Precise</source>
            <translation>正確</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>バランス</translation>
        </message>
        <message>
            <source>Creative</source>
            <translation>創造的</translation>
        </message>
        <message>
            <source>{0} beams</source>
            <translation>ビーム {0}</translation>
        </message>
        <message>
            <source>always the likeliest token</source>
            <translation>常に最も確率の高いトークン</translation>
        </message>
        <message>
            <source>temperature {0}</source>
            <translation>温度 {0}</translation>
        </message>
        <message>
            <source>top-k {0}</source>
            <translation>top-k {0}</translation>
        </message>
        <message>
            <source>top-p {0}</source>
            <translation>top-p {0}</translation>
        </message>
        <message>
            <source>min-p {0}</source>
            <translation>min-p {0}</translation>
        </message>
        <message>
            <source>repetition penalty {0}</source>
            <translation>繰り返しペナルティ {0}</translation>
        </message>
        <message>
            <source>presence penalty {0}</source>
            <translation>存在ペナルティ {0}</translation>
        </message>
        <message>
            <source>frequency penalty {0}</source>
            <translation>頻度ペナルティ {0}</translation>
        </message>
        <message>
            <source>loop guard {0}</source>
            <translation>ループ防止 {0}</translation>
        </message>
        <message>
            <source>thinking {0}</source>
            <translation>思考 {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatDocument</name>
        <message>
            <source>Chat</source>
            <translation>チャット</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>システムプロンプト</translation>
        </message>
        <message>
            <source>nothing could be written there</source>
            <translation>そこには書き込めませんでした</translation>
        </message>
        <message>
            <source>Assistant</source>
            <translation>アシスタント</translation>
        </message>
        <message>
            <source>You</source>
            <translation>あなた</translation>
        </message>
        <message>
            <source>Thoughts</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>picture</source>
            <translation>画像</translation>
        </message>
    </context>
    <context>
        <name>ChatFiles</name>
        <message>
            <source>The export was cancelled; no file was written.</source>
            <translation>エクスポートをキャンセルしました。ファイルは書き込まれていません。</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>チャット</translation>
        </message>
    </context>
    <context>
        <name>ChatStore</name>
        <message>
            <source>The chats in {path} were written by a newer Switchyard and are not changed. Chats made now are lost when the window closes: update Switchyard first.</source>
            <translation>{path}のチャットは新しいバージョンのSwitchyardで書かれたもので、変更されません。今作るチャットはウィンドウを閉じると失われます。先にSwitchyardを更新してください。</translation>
        </message>
        <message>
            <source>{folder} is read-only, so you can read your chats but not save new ones: what you write now is lost when the window closes. Make the folder writable and restart Switchyard.</source>
            <translation>{folder}は読み取り専用です。チャットを読むことはできますが、新しく保存できません。今書いた内容はウィンドウを閉じると失われます。フォルダーを書き込み可能にして、Switchyardを再起動してください。</translation>
        </message>
        <message>
            <source>The chat database was damaged. Recovered chats: {conversations}, messages: {messages}; messages lost: {lost}. The damaged file is kept as {path}.</source>
            <translation>チャットのデータベースが壊れていました。復元したチャット: {conversations}、メッセージ: {messages}、失われたメッセージ: {lost}。壊れたファイルは{path}として残っています。</translation>
        </message>
        <message>
            <source>The chat database was damaged and has been repaired (chats: {conversations}, messages: {messages}); no message seems to be missing. The damaged file is kept as {path}.</source>
            <translation>チャットのデータベースが壊れていましたが、修復しました（チャット: {conversations}、メッセージ: {messages}）。失われたメッセージはないようです。壊れたファイルは{path}として残っています。</translation>
        </message>
        <message>
            <source>The chat database was damaged and no message could be read from it. The damaged file is kept as {path}.</source>
            <translation>チャットのデータベースが壊れており、メッセージを読み出せませんでした。壊れたファイルは{path}として残っています。</translation>
        </message>
        <message>
            <source>The disk is full, so new text is not saved: free some space on the disk of {folder}.</source>
            <translation>ディスクがいっぱいのため、新しいテキストは保存されません。{folder}のあるディスクの空きを増やしてください。</translation>
        </message>
        <message>
            <source>Another program is using the chats in {folder}, so new text is not saved: close it.</source>
            <translation>別のプログラムが{folder}のチャットを使用中のため、新しいテキストは保存されません。そのプログラムを終了してください。</translation>
        </message>
        <message>
            <source>Chats cannot be saved in {folder} ({why}): check that it can be written to.</source>
            <translation>{folder}にチャットを保存できません（{why}）。書き込めるかご確認ください。</translation>
        </message>
        <message>
            <source>Switchyard closed during this answer.</source>
            <translation>この回答の途中でSwitchyardが終了しました。</translation>
        </message>
    </context>
    <context>
        <name>ChatTransfer</name>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Writing {0}…</source>
            <translation>{0}を書き込んでいます…</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0}ファイル</numerusform>
            </translation>
        </message>
        <message>
            <source>Importing {0}…</source>
            <translation>{0}をインポートしています…</translation>
        </message>
        <message>
            <source>{0} {1}, {2} chats so far</source>
            <translation>{0} {1}、これまでに{2}件のチャット</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>{0}に保存しました</translation>
        </message>
    </context>
    <context>
        <name>ChatView</name>
        <message>
            <source>Dismiss</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Keep this chat</source>
            <translation>このチャットを保存</translation>
        </message>
        <message>
            <source>Close for good</source>
            <translation>完全に閉じる</translation>
        </message>
        <message>
            <source>The starter is a small demo model: it gets facts wrong and may repeat itself.</source>
            <translation>スターターモデルは小さなデモ用モデルです。事実を誤ったり、同じ内容を繰り返したりすることがあります。</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>新しいチャット</translation>
        </message>
        <message>
            <source>Find in this chat</source>
            <translation>このチャット内を検索</translation>
        </message>
        <message>
            <source>Next match</source>
            <translation>次の一致</translation>
        </message>
        <message>
            <source>Previous match</source>
            <translation>前の一致</translation>
        </message>
        <message>
            <source>New scratch chat, which is never stored</source>
            <translation>保存されない新しい一時チャット</translation>
        </message>
        <message>
            <source>Search chats</source>
            <translation>チャットを検索</translation>
        </message>
        <message>
            <source>Choose the model</source>
            <translation>モデルを選択</translation>
        </message>
        <message>
            <source>Rename chat</source>
            <translation>チャットの名前を変更</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>回答を停止</translation>
        </message>
        <message>
            <source>Undo the last deletion or change of a chat</source>
            <translation>チャットの直前の削除や変更を元に戻す</translation>
        </message>
        <message>
            <source>Previous chat</source>
            <translation>前のチャット</translation>
        </message>
        <message>
            <source>Next chat</source>
            <translation>次のチャット</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>ファイルを添付</translation>
        </message>
        <message>
            <source>Print the chat</source>
            <translation>チャットを印刷</translation>
        </message>
        <message>
            <source>Ask two, side by side</source>
            <translation>2つに並べて質問</translation>
        </message>
        <message>
            <source>Write a message</source>
            <translation>メッセージを書く</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Enter</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>送信</translation>
        </message>
        <message>
            <source>Shift+Enter</source>
            <translation>Shift+Enter</translation>
        </message>
        <message>
            <source>Start a new line</source>
            <translation>改行する</translation>
        </message>
        <message>
            <source>The whole chat goes there, now and with each further message: your messages, their pictures and what is read of their documents, the answers and the system prompt. What happens with it is up to who runs that server.</source>
            <translation>チャット全体がそこに送信されます。今回も、以後のメッセージでも、あなたのメッセージ、その画像、文書から読み取った内容、回答、システムプロンプトが含まれます。どう扱われるかは、そのサーバーの運営者次第です。</translation>
        </message>
        <message>
            <source>The way there is not encrypted: others in the network can read it.</source>
            <translation>通信経路は暗号化されていません。ネットワーク内の第三者に読まれる可能性があります。</translation>
        </message>
        <message>
            <source>Send this chat to {0}?</source>
            <translation>このチャットを{0}に送信しますか?</translation>
        </message>
        <message>
            <source>Send it there</source>
            <translation>送信する</translation>
        </message>
        <message>
            <source>A scratch chat is never stored: to print it, keep it first.</source>
            <translation>一時チャットは保存されません。印刷するには先に保存してください。</translation>
        </message>
        <message>
            <source>Scratch chat: nothing of it is stored, and it is gone once it is closed.</source>
            <translation>一時チャット: 何も保存されず、閉じると消えます。</translation>
        </message>
        <message>
            <source>Undo  Ctrl+Z</source>
            <translation>元に戻す  Ctrl+Z</translation>
        </message>
        <message>
            <source>The scratch chat is gone.</source>
            <translation>一時チャットは消えました。</translation>
        </message>
        <message>
            <source>“{0}” was deleted.</source>
            <translation>「{0}」を削除しました。</translation>
        </message>
        <message>
            <source>The model is loading{0}. You can write now; the answer follows.</source>
            <translation>モデルを読み込んでいます{0}。今から入力できます。回答は後から届きます。</translation>
        </message>
        <message>
            <source>No model is loaded. You can write now; the answer follows once one is loaded.</source>
            <translation>モデルが読み込まれていません。今から入力できます。読み込まれると回答が届きます。</translation>
        </message>
        <message>
            <source>{0} runs on this machine; nothing you write leaves it.</source>
            <translation>{0}はこのマシンで動いています。書いた内容は外に出ません。</translation>
        </message>
    </context>
    <context>
        <name>Column</name>
        <message>
            <source>First</source>
            <translation>1つ目</translation>
        </message>
        <message>
            <source>Second</source>
            <translation>2つ目</translation>
        </message>
        <message>
            <source>{0}: model</source>
            <translation>{0}: モデル</translation>
        </message>
        <message>
            <source>{0}: sampling</source>
            <translation>{0}: サンプリング</translation>
        </message>
        <message>
            <source>{0} answer</source>
            <translation>{0}の回答</translation>
        </message>
        <message>
            <source>Go on with this</source>
            <translation>これで続ける</translation>
        </message>
        <message>
            <source>Go on with the {0} answer</source>
            <translation>{0}の回答で続ける</translation>
        </message>
    </context>
    <context>
        <name>Comparison</name>
        <message>
            <source>One model is open at a time on this PC: this answer comes second.</source>
            <translation>このPCで開けるモデルは一度に1つです。この回答は2番目になります。</translation>
        </message>
        <message>
            <source>The model is loading; its answer follows.</source>
            <translation>モデルを読み込んでいます。回答は後から届きます。</translation>
        </message>
        <message>
            <source>The model was not loaded, so there is no answer from it.</source>
            <translation>モデルを読み込めなかったため、回答はありません。</translation>
        </message>
    </context>
    <context>
        <name>Composer</name>
        <message>
            <source>Message Switchyard…</source>
            <translation>Switchyardにメッセージ…</translation>
        </message>
        <message>
            <source>Message</source>
            <translation>メッセージ</translation>
        </message>
        <message>
            <source>Enter sends, Shift+Enter starts a new line</source>
            <translation>Enterで送信、Shift+Enterで改行</translation>
        </message>
        <message>
            <source>Attach files or a folder</source>
            <translation>ファイルまたはフォルダーを添付</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>システムプロンプト</translation>
        </message>
        <message>
            <source>Instructions the model reads first</source>
            <translation>モデルが最初に読む指示</translation>
        </message>
        <message>
            <source>The model may call tools in this chat</source>
            <translation>このチャットではモデルがツールを呼び出せます</translation>
        </message>
        <message>
            <source>Let the model call tools</source>
            <translation>モデルにツールの呼び出しを許可</translation>
        </message>
        <message>
            <source>Sampling: {0}</source>
            <translation>サンプリング: {0}</translation>
        </message>
        <message>
            <source>How the next token is chosen: {0}</source>
            <translation>次のトークンの選び方: {0}</translation>
        </message>
        <message>
            <source>Files…</source>
            <translation>ファイル…</translation>
        </message>
        <message>
            <source>Folder…</source>
            <translation>フォルダー…</translation>
        </message>
        <message>
            <source>System</source>
            <translation>システム</translation>
        </message>
        <message>
            <source>Stop  Esc</source>
            <translation>停止  Esc</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>送信</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>回答を停止</translation>
        </message>
    </context>
    <context>
        <name>ComputingCard</name>
        <message>
            <source>Time it</source>
            <translation>計測</translation>
        </message>
        <message>
            <source>Loads the model with these settings, has it write a little, and measures that</source>
            <translation>この設定でモデルを読み込み、少し生成させて計測します</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>モデルを再読み込み</translation>
        </message>
        <message>
            <source>Changes apply at the next start, or now with these buttons.</source>
            <translation>変更は次回の起動時、またはこれらのボタンですぐに適用されます。</translation>
        </message>
        <message>
            <source>Loading the model and timing it…</source>
            <translation>モデルを読み込んで計測しています…</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured just now</source>
            <translation>{0}: {1} トークン/秒（計測直後）</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>スターターモデル</translation>
        </message>
        <message>
            <source>No graphics card computes here.</source>
            <translation>ここではグラフィックスカードは計算に使われていません。</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured</source>
            <translation>{0}: {1} トークン/秒（実測）</translation>
        </message>
        <message>
            <source>{0}: about {1} tokens/s, {2} to {3}</source>
            <translation>{0}: 約{1} トークン/秒、{2}～{3}</translation>
        </message>
    </context>
    <context>
        <name>ContextMeter</name>
        <message>
            <source>Context</source>
            <translation>コンテキスト</translation>
        </message>
        <message>
            <source>Estimate, including your draft; the engine counts with the next answer.</source>
            <translation>下書きを含む推定値です。次の回答時にエンジンが数えます。</translation>
        </message>
        <message>
            <source>Counted by the engine after the last answer.</source>
            <translation>直前の回答の後にエンジンが数えた値です。</translation>
        </message>
        <message>
            <source>Click to see and change the length.</source>
            <translation>クリックすると長さの確認と変更ができます。</translation>
        </message>
        <message>
            <source>context {0} of {1}</source>
            <translation>コンテキスト {0}/{1}</translation>
        </message>
        <message>
            <source>context about {0} of {1}</source>
            <translation>コンテキスト 約{0}/{1}</translation>
        </message>
        <message>
            <source>context filling up: {0} of {1}</source>
            <translation>コンテキスト残り少 {0}/{1}</translation>
        </message>
        <message>
            <source>context filling up: about {0} of {1}</source>
            <translation>コンテキスト残り少 約{0}/{1}</translation>
        </message>
        <message>
            <source>context almost full: {0} of {1}</source>
            <translation>コンテキストほぼ満杯 {0}/{1}</translation>
        </message>
        <message>
            <source>context almost full: about {0} of {1}</source>
            <translation>コンテキストほぼ満杯 約{0}/{1}</translation>
        </message>
        <message>
            <source>context exceeded: {0} of {1}</source>
            <translation>コンテキスト超過 {0}/{1}</translation>
        </message>
        <message>
            <source>context exceeded: about {0} of {1}</source>
            <translation>コンテキスト超過 約{0}/{1}</translation>
        </message>
    </context>
    <context>
        <name>ContextPopover</name>
        <message>
            <source>Context</source>
            <translation>コンテキスト</translation>
        </message>
        <message>
            <source>Length of the context, in steps</source>
            <translation>コンテキストの長さ（段階）</translation>
        </message>
        <message>
            <source> tokens</source>
            <translation> トークン</translation>
        </message>
        <message>
            <source>Length of the context</source>
            <translation>コンテキストの長さ</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>モデルを再読み込み</translation>
        </message>
        <message>
            <source>Fold earlier turns into a summary</source>
            <translation>以前のやり取りを要約する</translation>
        </message>
        <message>
            <source>Leave out the oldest turns</source>
            <translation>最も古いやり取りを除外</translation>
        </message>
        <message>
            <source>Length</source>
            <translation>長さ</translation>
        </message>
        <message>
            <source>About {0} of {1} tokens are used ({2}).</source>
            <translation>{1}トークン中、約{0}を使用中（{2}）。</translation>
        </message>
        <message>
            <source>{0} of {1} tokens used ({2}).</source>
            <translation>{1}トークン中、{0}を使用中（{2}）。</translation>
        </message>
        <message>
            <source>There is no earlier answer to fold yet.</source>
            <translation>要約できる以前の回答がまだありません。</translation>
        </message>
        <message>
            <source>The length is set by {0}.</source>
            <translation>長さは{0}で設定されています。</translation>
        </message>
        <message>
            <source>Keys and values of {0} tokens take {1} of {2} ({3} each).</source>
            <translation>{0}トークン分のキーとバリューは、{2}のうち{1}を使います（1つあたり{3}）。</translation>
        </message>
        <message>
            <source>That is more than is free now ({0}).</source>
            <translation>現在の空き（{0}）を超えています。</translation>
        </message>
        <message>
            <source>The model is loaded with {0} tokens: the change needs it loaded again.</source>
            <translation>モデルは{0}トークンで読み込まれています。変更するには再読み込みが必要です。</translation>
        </message>
    </context>
    <context>
        <name>ConversationDelegate</name>
        <message>
            <source>New title</source>
            <translation>新しいタイトル</translation>
        </message>
    </context>
    <context>
        <name>ConversationPanel</name>
        <message>
            <source>Search chats</source>
            <translation>チャットを検索</translation>
        </message>
        <message>
            <source>Folders, scratch chats, import and export</source>
            <translation>フォルダー、一時チャット、インポートとエクスポート</translation>
        </message>
        <message>
            <source>More for chats</source>
            <translation>チャットのその他の操作</translation>
        </message>
        <message>
            <source>Chats</source>
            <translation>チャット</translation>
        </message>
        <message>
            <source>No chat contains these words.</source>
            <translation>これらの語を含むチャットはありません。</translation>
        </message>
        <message>
            <source>Rename	F2</source>
            <translation>名前を変更	F2</translation>
        </message>
        <message>
            <source>Close for good	Del</source>
            <translation>完全に閉じる	Del</translation>
        </message>
        <message>
            <source>Unpin</source>
            <translation>ピン留めを外す</translation>
        </message>
        <message>
            <source>Pin to the top</source>
            <translation>先頭にピン留め</translation>
        </message>
        <message>
            <source>Export…</source>
            <translation>エクスポート…</translation>
        </message>
        <message>
            <source>Print…</source>
            <translation>印刷…</translation>
        </message>
        <message>
            <source>Delete	Del</source>
            <translation>削除	Del</translation>
        </message>
        <message>
            <source>Move to folder</source>
            <translation>フォルダーに移動</translation>
        </message>
        <message>
            <source>No folder</source>
            <translation>フォルダーなし</translation>
        </message>
        <message>
            <source>New folder…</source>
            <translation>新しいフォルダー…</translation>
        </message>
        <message>
            <source>Collapse</source>
            <translation>折りたたむ</translation>
        </message>
        <message>
            <source>Expand</source>
            <translation>展開</translation>
        </message>
        <message>
            <source>Delete…	Del</source>
            <translation>削除…	Del</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>新しいフォルダー</translation>
        </message>
        <message>
            <source>New scratch chat	Ctrl+Shift+N</source>
            <translation>新しい一時チャット	Ctrl+Shift+N</translation>
        </message>
        <message>
            <source>Import chats…</source>
            <translation>チャットをインポート…</translation>
        </message>
        <message>
            <source>Export chat…</source>
            <translation>チャットをエクスポート…</translation>
        </message>
        <message>
            <source>Print chat…</source>
            <translation>チャットを印刷…</translation>
        </message>
        <message>
            <source>Export all chats…</source>
            <translation>すべてのチャットをエクスポート…</translation>
        </message>
    </context>
    <context>
        <name>CopyButton</name>
        <message>
            <source>Copied</source>
            <translation>コピーしました</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>コピー</translation>
        </message>
        <message>
            <source>Copy code</source>
            <translation>コードをコピー</translation>
        </message>
    </context>
    <context>
        <name>CoreGrid</name>
        <message>
            <source>{0} CPUs, {1}% busy on average; busiest: number {2} with {3}%</source>
            <translation>CPU {0}個、平均使用率{1}%。最大は{2}番の{3}%</translation>
        </message>
        <message>
            <source>CPU {0}: {1}% busy</source>
            <translation>CPU {0}: 使用率{1}%</translation>
        </message>
    </context>
    <context>
        <name>DataCard</name>
        <message>
            <source>Data</source>
            <translation>データ</translation>
        </message>
        <message>
            <source>Open folder</source>
            <translation>フォルダーを開く</translation>
        </message>
        <message>
            <source>Change…</source>
            <translation>変更…</translation>
        </message>
        <message>
            <source>Data folder</source>
            <translation>データフォルダー</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>元に戻す</translation>
        </message>
        <message>
            <source>Folder for chats and models</source>
            <translation>チャットとモデルのフォルダー</translation>
        </message>
        <message>
            <source>Copy your chats and models to {0}?</source>
            <translation>チャットとモデルを{0}にコピーしますか?</translation>
        </message>
        <message>
            <source>They are copied at the next start. The current folder stays until you delete it.</source>
            <translation>次回の起動時にコピーされます。現在のフォルダーは、削除するまで残ります。</translation>
        </message>
        <message>
            <source>Copy them</source>
            <translation>コピーする</translation>
        </message>
        <message>
            <source>Start empty</source>
            <translation>空の状態で始める</translation>
        </message>
        <message>
            <source>At the next start your chats and models are copied to {0}, which is then used.</source>
            <translation>次回の起動時にチャットとモデルが{0}にコピーされ、以後そこが使われます。</translation>
        </message>
        <message>
            <source>The data in {0} is used from the next start.</source>
            <translation>次回の起動から{0}のデータが使われます。</translation>
        </message>
    </context>
    <context>
        <name>DataFolder</name>
        <message>
            <source>{0} is inside the current data folder; choose a folder outside it.</source>
            <translation>{0}は現在のデータフォルダーの中にあります。外のフォルダーを選んでください。</translation>
        </message>
        <message>
            <source>{0} cannot be written to ({1}); choose another folder.</source>
            <translation>{0}に書き込めません（{1}）。別のフォルダーを選んでください。</translation>
        </message>
        <message>
            <source>The data could not be copied to {0} ({1}); {2} stays in use.</source>
            <translation>データを{0}にコピーできませんでした（{1}）。引き続き{2}を使います。</translation>
        </message>
        <message>
            <source>{0} has {1} free, but {2} are to be copied; {3} stays in use.</source>
            <translation>{0}の空きは{1}ですが、コピーするのは{2}です。引き続き{3}を使います。</translation>
        </message>
    </context>
    <context>
        <name>DataFolderStart</name>
        <message>
            <source>Copying chats and models to {0}…</source>
            <translation>チャットとモデルを{0}にコピーしています…</translation>
        </message>
        <message>
            <source>Keep the current folder</source>
            <translation>現在のフォルダーを使い続ける</translation>
        </message>
        <message>
            <source>The data folder could not be changed.</source>
            <translation>データフォルダーを変更できませんでした。</translation>
        </message>
        <message>
            <source>The data folder {0} is missing.</source>
            <translation>データフォルダー{0}が見つかりません。</translation>
        </message>
        <message>
            <source>Plug in its drive and try again, or continue with the default folder {0}.</source>
            <translation>ドライブを接続して再試行するか、既定のフォルダー{0}で続けてください。</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>再試行</translation>
        </message>
        <message>
            <source>Use the default folder</source>
            <translation>既定のフォルダーを使う</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>終了</translation>
        </message>
        <message>
            <source>Switchyard is already open with the data folder {0}, but does not respond. End it, in the system's task manager if necessary, and start again.</source>
            <translation>Switchyardはデータフォルダー{0}ですでに開いていますが、応答しません。必要ならタスクマネージャーで終了し、もう一度起動してください。</translation>
        </message>
        <message>
            <source>The data folder {0} cannot be written to; check its permissions and free space, then start again.</source>
            <translation>データフォルダー{0}に書き込めません。アクセス権と空き容量を確認し、もう一度起動してください。</translation>
        </message>
        <message>
            <source>{0} is not a file, and Switchyard keeps one there: move it away, then start again.</source>
            <translation>{0}はファイルではありませんが、Switchyardはそこにファイルを置きます。別の場所に移して、もう一度起動してください。</translation>
        </message>
    </context>
    <context>
        <name>Diagnosis</name>
        <message>
            <source>The report could not be written to {0}: choose another folder.</source>
            <translation>レポートを{0}に書き込めませんでした。別のフォルダーを選んでください。</translation>
        </message>
    </context>
    <context>
        <name>Downloads</name>
        <message>
            <source>Downloads could not be started: reinstall Switchyard.</source>
            <translation>ダウンロードを開始できませんでした。Switchyardを再インストールしてください。</translation>
        </message>
        <message>
            <source>The downloads stopped and could not be started again; try Resume.</source>
            <translation>ダウンロードが停止し、再開できませんでした。「再開」をお試しください。</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>connecting</source>
            <translation>接続中</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>残り{0}</translation>
        </message>
        <message>
            <source>waits for its turn</source>
            <translation>順番待ち</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>一時停止中</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失敗</translation>
        </message>
        <message>
            <source>done</source>
            <translation>完了</translation>
        </message>
        <message>
            <source>{0} that are already here are deleted. To keep them, pause it instead.</source>
            <translation>すでに取得した{0}は削除されます。残すには、代わりに一時停止してください。</translation>
        </message>
        <message>
            <source>Cancel the download of {0}?</source>
            <translation>{0}のダウンロードをキャンセルしますか?</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>ダウンロードをキャンセル</translation>
        </message>
        <message>
            <source>Keep it</source>
            <translation>続ける</translation>
        </message>
    </context>
    <context>
        <name>DownloadsCard</name>
        <message>
            <source>Downloads</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>Speed limit</source>
            <translation>速度制限</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>最大{0}</translation>
        </message>
        <message>
            <source>no speed limit</source>
            <translation>速度制限なし</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>一時停止</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>再開</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>アクセストークン…</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Earlier (Alt+Up)</source>
            <translation>先にする (Alt+↑)</translation>
        </message>
        <message>
            <source>Later (Alt+Down)</source>
            <translation>後にする (Alt+↓)</translation>
        </message>
    </context>
    <context>
        <name>DownloadsMark</name>
        <message>
            <source>Downloads</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>1 download, {0}%</source>
            <translation>取得中1件、{0}%</translation>
        </message>
        <message numerus="yes">
            <source>{0} downloads, {1}%</source>
            <translation>
                <numerusform>取得中{0}件、{1}%</numerusform>
            </translation>
        </message>
        <message>
            <source>A download stopped</source>
            <translation>ダウンロードが停止しました</translation>
        </message>
        <message>
            <source>{0}: show them</source>
            <translation>{0}: 表示する</translation>
        </message>
    </context>
    <context>
        <name>DownloadsView</name>
        <message>
            <source>Downloads</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>Pause or resume the download</source>
            <translation>ダウンロードを一時停止または再開</translation>
        </message>
        <message>
            <source>Download it earlier</source>
            <translation>先にダウンロード</translation>
        </message>
        <message>
            <source>Download it later</source>
            <translation>後でダウンロード</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>ダウンロードをキャンセル</translation>
        </message>
    </context>
    <context>
        <name>EmptyBatch</name>
        <message>
            <source>Every row is answered, many at a time. The result file keeps the input's columns.</source>
            <translation>すべての行に、まとめて回答します。結果ファイルには入力の列が残ります。</translation>
        </message>
        <message>
            <source>Accepted: csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html, a folder of such files, and OpenAI batch files.</source>
            <translation>対応形式: csv、tsv、jsonl、parquet、xlsx、txt、md、pdf、docx、html、それらの入ったフォルダー、OpenAIのバッチファイル。</translation>
        </message>
        <message>
            <source>Choose a file…</source>
            <translation>ファイルを選択…</translation>
        </message>
        <message>
            <source>Choose a folder…</source>
            <translation>フォルダーを選択…</translation>
        </message>
        <message>
            <source>Drop a file of prompts here</source>
            <translation>プロンプトのファイルをここにドロップ</translation>
        </message>
    </context>
    <context>
        <name>EmptyChat</name>
        <message>
            <source>Ask something to begin</source>
            <translation>何か質問してみましょう</translation>
        </message>
        <message>
            <source>Choose a model</source>
            <translation>モデルを選択</translation>
        </message>
        <message>
            <source>What is the capital of France? Answer in one sentence.</source>
            <translation>フランスの首都はどこですか? 1文で答えてください。</translation>
        </message>
        <message>
            <source>Write one sentence about the sea.</source>
            <translation>海について1文書いてください。</translation>
        </message>
        <message>
            <source>Why should we drink water? Answer in one sentence.</source>
            <translation>なぜ水を飲む必要があるのですか? 1文で答えてください。</translation>
        </message>
        <message>
            <source>Why do people like music? Answer in one sentence.</source>
            <translation>人はなぜ音楽が好きなのですか? 1文で答えてください。</translation>
        </message>
    </context>
    <context>
        <name>Engine</name>
        <message>
            <source>The graphics card limits the speed: it is busy {0} of the time, reading at {1} GB/s.</source>
            <translation>速度の上限はグラフィックスカードです。稼働率{0}、読み出し{1} GB/s。</translation>
        </message>
        <message>
            <source>The CPU limits the speed.</source>
            <translation>速度の上限はCPUです。</translation>
        </message>
        <message>
            <source>Reading {0} from RAM limits the speed: the CPU is busy {1} of the time, at {2} GB/s.</source>
            <translation>速度の上限はRAMからの読み出し（{0}）です。CPUの稼働率{1}、{2} GB/s。</translation>
        </message>
        <message>
            <source>The link to the card limits the speed: it is busy {0} of the time, at {1} GB/s.</source>
            <translation>速度の上限はカードとの接続です。稼働率{0}、{1} GB/s。</translation>
        </message>
        <message>
            <source>CPU arithmetic limits the speed: the CPU is busy {0} of the time, and computing experts takes longer than reading them from RAM.</source>
            <translation>速度の上限はCPUの演算です。稼働率{0}で、エキスパートの計算にRAMからの読み出しより時間がかかっています。</translation>
        </message>
        <message>
            <source>Launching many small operations on the card limits the speed: {0} ms of the {1} ms per token.</source>
            <translation>速度の上限はカードでの多数の小さな処理の起動です。トークンあたり{1} msのうち{0} ms。</translation>
        </message>
        <message>
            <source>Layers are read for each token: rows of a file share that, and gain most.</source>
            <translation>レイヤーをトークンごとに読み込みます。ファイルの行はこれを共有するため、最も効果があります。</translation>
        </message>
        <message>
            <source>No single change of memory, link, disk or precision would make a noticeable difference.</source>
            <translation>メモリ、接続、ディスク、精度のどれか1つを変えても、目立った違いはありません。</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, {2} times as fast with the prompt included.</source>
            <translation>最も効果的: {0}。{1} トークン/秒、プロンプトを含めて{2}倍の速さ。</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, about {2} times as fast.</source>
            <translation>最も効果的: {0}。{1} トークン/秒、約{2}倍の速さ。</translation>
        </message>
        <message>
            <source>{0} GB of RAM</source>
            <translation>{0} GBのRAM</translation>
        </message>
        <message>
            <source>A card with {0} GB</source>
            <translation>{0} GBのカード</translation>
        </message>
        <message>
            <source>A link to the card that is twice as fast</source>
            <translation>2倍速いカード接続</translation>
        </message>
        <message>
            <source>A disk that is twice as fast</source>
            <translation>2倍速いディスク</translation>
        </message>
        <message>
            <source>RAM that is twice as fast</source>
            <translation>2倍速いRAM</translation>
        </message>
        <message>
            <source>All {0} threads</source>
            <translation>全{0}スレッド</translation>
        </message>
        <message>
            <source>expert weights</source>
            <translation>エキスパートの重み</translation>
        </message>
        <message>
            <source>as stored ({0}-bit)</source>
            <translation>保存されたまま（{0} ビット）</translation>
        </message>
        <message>
            <source>as stored ({0}-bit and {1}-bit)</source>
            <translation>保存されたまま（{0} ビットと {1} ビット）</translation>
        </message>
        <message>
            <source>as stored ({0}-bit, {1}-bit and {2}-bit)</source>
            <translation>保存されたまま（{0}、{1}、{2} ビット）</translation>
        </message>
        <message>
            <source>Switchyard mixed</source>
            <translation>Switchyard 混合</translation>
        </message>
        <message>
            <source>Switchyard mixed, static</source>
            <translation>Switchyard 混合、固定</translation>
        </message>
        <message>
            <source>Switchyard mixed, predicted</source>
            <translation>Switchyard 混合、予測あり</translation>
        </message>
        <message>
            <source>Switchyard, misses on the CPU</source>
            <translation>Switchyard、不足分は CPU</translation>
        </message>
        <message>
            <source>CPU only</source>
            <translation>CPU のみ</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>エキスパートは CPU</translation>
        </message>
        <message>
            <source>on-demand</source>
            <translation>必要に応じて</translation>
        </message>
        <message>
            <source>whole-layer prefetch</source>
            <translation>層全体を先読み</translation>
        </message>
        <message>
            <source>the other weights and the KV cache</source>
            <translation>ほかの重みとKVキャッシュ</translation>
        </message>
        <message>
            <source>the weights and the KV cache</source>
            <translation>重みとKVキャッシュ</translation>
        </message>
        <message>
            <source>From now on: {0}, {1} tokens/s.</source>
            <translation>今後の設定: {0}、{1} トークン/秒。</translation>
        </message>
        <message>
            <source>Before: {0} tokens/s, so {1} times.</source>
            <translation>以前は{0} トークン/秒で、{1}倍になりました。</translation>
        </message>
        <message>
            <source>Before, it could not run.</source>
            <translation>以前は動作しませんでした。</translation>
        </message>
        <message>
            <source>The settings stay the same: {0} tokens/s, and nothing else is better.</source>
            <translation>設定はそのままです: {0} トークン/秒で、これ以上のものはありません。</translation>
        </message>
        <message>
            <source>{0} did not answer within {1} seconds.</source>
            <translation>{0} は {1} 秒以内に応答しませんでした。</translation>
        </message>
        <message>
            <source>{0} did not speak MCP within {1} seconds of its start: check its command or address.</source>
            <translation>{0} は起動後 {1} 秒以内に MCP で応答しませんでした。コマンドまたはアドレスを確認してください。</translation>
        </message>
        <message>
            <source>{0} ended in the middle of it.</source>
            <translation>{0} は途中で終了しました。</translation>
        </message>
        <message>
            <source>{0} sent more than {1} MB at once, and was stopped.</source>
            <translation>{0} は一度に {1} MB を超えて送信したため、停止しました。</translation>
        </message>
        <message>
            <source>{0} could not be started ({1}): check its command.</source>
            <translation>{0} を起動できませんでした ({1})。コマンドを確認してください。</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP.</source>
            <translation>{0} は終了したか、MCP に対応していません。</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP. It wrote: {1}</source>
            <translation>{0} は終了したか、MCP に対応していません。出力: {1}</translation>
        </message>
        <message>
            <source>Give the server a name.</source>
            <translation>サーバーに名前を付けてください。</translation>
        </message>
        <message>
            <source>{0} needs either a command or an address: enter one of them.</source>
            <translation>{0} にはコマンドかアドレスのどちらかが必要です。入力してください。</translation>
        </message>
        <message>
            <source>This is not JSON ({0}): paste the whole block.</source>
            <translation>JSON ではありません ({0})。ブロック全体を貼り付けてください。</translation>
        </message>
        <message>
            <source>The user did not allow this call.</source>
            <translation>この呼び出しは許可されませんでした。</translation>
        </message>
        <message>
            <source>There is no tool of this name.</source>
            <translation>この名前のツールはありません。</translation>
        </message>
        <message>
            <source>The expression divides by zero.</source>
            <translation>式がゼロで割っています。</translation>
        </message>
        <message>
            <source>No folder is attached to this chat: attach one first.</source>
            <translation>このチャットにフォルダーが添付されていません。先に添付してください。</translation>
        </message>
        <message>
            <source>{0} was removed or is off.</source>
            <translation>{0} は削除されたか、オフになっています。</translation>
        </message>
        <message>
            <source>The process with the tools ended.</source>
            <translation>ツールのプロセスが終了しました。</translation>
        </message>
        <message>
            <source>The process with the tools could not be started.</source>
            <translation>ツールのプロセスを起動できませんでした。</translation>
        </message>
        <message>
            <source>The tools did not respond, and were stopped.</source>
            <translation>ツールが応答しないため、停止しました。</translation>
        </message>
        <message>
            <source>The call was stopped.</source>
            <translation>呼び出しは停止されました。</translation>
        </message>
        <message>
            <source>The arguments are no JSON object.</source>
            <translation>引数が JSON オブジェクトではありません。</translation>
        </message>
        <message>
            <source>{0} was called with the same arguments {1} times: no more calls, answer now.</source>
            <translation>{0} が同じ引数で {1} 回呼び出されました。これ以上呼び出さず、ここで回答してください。</translation>
        </message>
        <message>
            <source>Tools were called {0} times in a row: no more calls, answer now.</source>
            <translation>ツールが {0} 回続けて呼び出されました。これ以上呼び出さず、ここで回答してください。</translation>
        </message>
        <message>
            <source>More than {0} tools were called at once: no more calls, answer now.</source>
            <translation>一度に {0} 個を超えるツールが呼び出されました。これ以上呼び出さず、ここで回答してください。</translation>
        </message>
        <message>
            <source>{0} has no command and no address: enter one of them.</source>
            <translation>{0} にはコマンドもアドレスもありません。どちらかを入力してください。</translation>
        </message>
        <message>
            <source>The address of {0} does not begin with http:// or https://: correct it.</source>
            <translation>{0} のアドレスが http:// または https:// で始まっていません。修正してください。</translation>
        </message>
        <message>
            <source>The arguments of {0} are not a list of texts: correct them.</source>
            <translation>{0} の引数がテキストのリストではありません。修正してください。</translation>
        </message>
        <message>
            <source>The command of {0} has a character that no command can have: correct it.</source>
            <translation>{0} のコマンドに使えない文字があります。修正してください。</translation>
        </message>
        <message>
            <source>The variables or headers of {0} are not names with texts: correct them.</source>
            <translation>{0} の変数またはヘッダーが名前とテキストの組になっていません。修正してください。</translation>
        </message>
        <message>
            <source>No servers are in it: it needs "mcpServers" with a name for each.</source>
            <translation>サーバーが含まれていません。"mcpServers" とそれぞれの名前が必要です。</translation>
        </message>
        <message>
            <source>{0} servers are too many: up to {1} can be added.</source>
            <translation>{0} 個のサーバーは多すぎます。追加できるのは {1} 個までです。</translation>
        </message>
        <message>
            <source>{0} needs its {1} again, which was kept for one run only: edit the server.</source>
            <translation>{0} には {1} がもう一度必要です。一回の実行中だけ保存されていました。サーバーを編集してください。</translation>
        </message>
        <message>
            <source>{0} needs {1} in the environment, where it is not set: set it.</source>
            <translation>{0} には環境変数 {1} が必要ですが、設定されていません。設定してください。</translation>
        </message>
        <message>
            <source>No documents are attached to this chat.</source>
            <translation>このチャットに文書が添付されていません。</translation>
        </message>
        <message>
            <source>There is no tool named {0}.</source>
            <translation>{0} というツールはありません。</translation>
        </message>
        <message>
            <source>A batch has a prompt and 1 to {0} rows.</source>
            <translation>バッチにはプロンプトと 1～{0} 行が必要です。</translation>
        </message>
        <message>
            <source>The rows cannot be written to {0} ({1}).</source>
            <translation>行を {0} に書き込めません（{1}）。</translation>
        </message>
        <message>
            <source>The file {0} cannot be read ({1}).</source>
            <translation>ファイル {0} を読み取れません（{1}）。</translation>
        </message>
        <message>
            <source>The file {0} is no text.</source>
            <translation>ファイル {0} はテキストではありません。</translation>
        </message>
        <message>
            <source>No attached folder has a file {0}.</source>
            <translation>添付されたフォルダーにファイル {0} はありません。</translation>
        </message>
        <message>
            <source>The result has too many digits.</source>
            <translation>結果の桁数が多すぎます。</translation>
        </message>
        <message>
            <source>The result is no real number.</source>
            <translation>結果が実数ではありません。</translation>
        </message>
        <message>
            <source>A factorial is of a whole number from 0 to 1000.</source>
            <translation>階乗は 0～1000 の整数についてのみ計算します。</translation>
        </message>
        <message>
            <source>An expression has 1 to {0} characters.</source>
            <translation>式は 1～{0} 文字です。</translation>
        </message>
        <message>
            <source>The expression cannot be read ({0}).</source>
            <translation>式を読み取れません（{0}）。</translation>
        </message>
        <message>
            <source>The expression cannot be computed ({0}).</source>
            <translation>式を計算できません（{0}）。</translation>
        </message>
        <message>
            <source>Only numbers, + - * / // % **, and functions such as sqrt, log, sin and round are computed.</source>
            <translation>計算できるのは数値、+ - * / // % **、および sqrt、log、sin、round などの関数だけです。</translation>
        </message>
        <message>
            <source>The starter model is not on this machine yet.</source>
            <translation>スターターモデルがまだこのマシンにありません。</translation>
        </message>
        <message>
            <source>There is no file {0}: check the path.</source>
            <translation>ファイル{0}がありません。パスをご確認ください。</translation>
        </message>
        <message>
            <source>There is no folder {0}: check the path.</source>
            <translation>フォルダー{0}がありません。パスをご確認ください。</translation>
        </message>
        <message>
            <source>There is no model at {0}: check the path.</source>
            <translation>{0}にモデルがありません。パスをご確認ください。</translation>
        </message>
        <message>
            <source>{0} is not a folder: check the path.</source>
            <translation>{0}はフォルダーではありません。パスをご確認ください。</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): check the path.</source>
            <translation>{0}を読めません（{1}）。パスをご確認ください。</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): download or copy the model again.</source>
            <translation>{0}を読めません（{1}）。モデルをもう一度ダウンロードまたはコピーしてください。</translation>
        </message>
        <message>
            <source>{0} has no {1}, so it is not a complete model: download or copy it again.</source>
            <translation>{0}に{1}がなく、モデルが不完全です。もう一度ダウンロードまたはコピーしてください。</translation>
        </message>
        <message>
            <source>{0} is a pickle file, which can run code when opened, so Switchyard never loads one: use the model's safetensors version.</source>
            <translation>{0}は開くとコードを実行しうるpickleファイルで、Switchyardは読み込みません。モデルのsafetensors版をお使いください。</translation>
        </message>
        <message>
            <source>{0} is in use: unload it in Switchyard's window, end other programs with it, and try again.</source>
            <translation>{0}は使用中です。Switchyardのウィンドウでアンロードし、使っているほかのプログラムを終了してから、もう一度お試しください。</translation>
        </message>
        <message>
            <source>{0} is being moved or removed: wait until that is done.</source>
            <translation>{0}を移動または削除しています。終わるまでお待ちください。</translation>
        </message>
        <message>
            <source>{0} exists already: choose another name.</source>
            <translation>{0}はすでにあります。別の名前を選んでください。</translation>
        </message>
        <message>
            <source>{0} is already in the library.</source>
            <translation>{0}はすでにライブラリにあります。</translation>
        </message>
        <message>
            <source>The model folder {0} is not there: connect its disk, or take the folder off the list.</source>
            <translation>モデルのフォルダー{0}がありません。ディスクを接続するか、フォルダーを一覧から外してください。</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and try again.</source>
            <translation>{0}のディスクがいっぱいです。空きを作ってから、もう一度お試しください。</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and let the download go on; nothing is lost.</source>
            <translation>{0}のディスクがいっぱいです。空きを作ってダウンロードを再開してください。失われたものはありません。</translation>
        </message>
        <message>
            <source>The disk of {0} is full: free some space, and the job continues.</source>
            <translation>{0}のディスクがいっぱいです。空きを作るとジョブが続きます。</translation>
        </message>
        <message>
            <source>Cannot read or write {0} ({1}): check its permissions and the disk.</source>
            <translation>{0}を読み書きできません（{1}）。アクセス権とディスクをご確認ください。</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, but only {3} are free: close other programs or choose a smaller model.</source>
            <translation>{0}には{1}のRAM{2}が必要ですが、空きは{3}です。ほかのプログラムを閉じるか、小さいモデルを選んでください。</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, more than the {3} that the RAM budget allows: raise the budget or choose a smaller model.</source>
            <translation>{0}には{1}のRAM{2}が必要で、RAMの上限{3}を超えています。上限を上げるか、小さいモデルを選んでください。</translation>
        </message>
        <message>
            <source>{0} ran out of memory: close other programs, or allow the model less memory or a shorter context.</source>
            <translation>{0}のメモリが足りません。ほかのプログラムを閉じるか、モデルのメモリやコンテキストを減らしてください。</translation>
        </message>
        <message>
            <source>{0} has no graphics card: choose one first.</source>
            <translation>{0}にはグラフィックスカードがありません。先に選んでください。</translation>
        </message>
        <message>
            <source>The graphics card stopped responding, so the model runs on the CPU now.</source>
            <translation>グラフィックスカードが応答しなくなったため、モデルをCPUで動かしています。</translation>
        </message>
        <message>
            <source>The NVIDIA driver does not respond: restart the computer, or update the driver.</source>
            <translation>NVIDIAドライバーが応答しません。コンピューターを再起動するか、ドライバーを更新してください。</translation>
        </message>
        <message>
            <source>No NVIDIA driver was found.</source>
            <translation>NVIDIAドライバーが見つかりませんでした。</translation>
        </message>
        <message>
            <source>The {0} was {1} and is now {2}.</source>
            <translation>変更点: {0}（以前は{1}、現在は{2}）。</translation>
        </message>
        <message>
            <source>The prompt is {0} tokens long, but this model holds {1} together with the answer: shorten it by {2} tokens, or start a new chat.</source>
            <translation>プロンプトは{0}トークンですが、このモデルが扱えるのは回答を含めて{1}です。{2}トークン短くするか、新しいチャットを始めてください。</translation>
        </message>
        <message>
            <source>No model is loaded: choose one first.</source>
            <translation>モデルが読み込まれていません。先に選んでください。</translation>
        </message>
        <message>
            <source>There was not enough memory to choose this answer's next token: close other programs and ask again.</source>
            <translation>この回答の次のトークンを選ぶメモリが足りませんでした。ほかのプログラムを閉じて、もう一度質問してください。</translation>
        </message>
        <message>
            <source>Could not read {0} from {1} ({2}): check the network; models on this PC still work.</source>
            <translation>{1}から{0}を読めませんでした（{2}）。ネットワークをご確認ください。このPCのモデルは引き続き使えます。</translation>
        </message>
        <message>
            <source>{0} cannot be reached: waiting for the network.</source>
            <translation>{0}に接続できません。ネットワークを待っています。</translation>
        </message>
        <message>
            <source>The connection to {0} broke: trying again.</source>
            <translation>{0}との接続が切れました。再試行しています。</translation>
        </message>
        <message>
            <source>{0} sends nothing: waiting.</source>
            <translation>{0}から何も届きません。待っています。</translation>
        </message>
        <message>
            <source>{0} gives {1} only to those it knows: enter an access token of an account that may read it.</source>
            <translation>{0}は{1}を許可された人にだけ提供しています。読み取りできるアカウントのアクセストークンを入力してください。</translation>
        </message>
        <message>
            <source>{0} got too many requests from here: try again {1}.</source>
            <translation>ここから{0}への要求が多すぎます。後でもう一度お試しください（{1}）。</translation>
        </message>
        <message>
            <source>{0} gave no answer ({1}): check that the server runs, and the network.</source>
            <translation>{0}が応答しませんでした（{1}）。サーバーが動いているか、ネットワークとともにご確認ください。</translation>
        </message>
        <message>
            <source>There is no server with OpenAI's interface at {0} ({1}): check the address.</source>
            <translation>{0}にOpenAIインターフェイスのサーバーがありません（{1}）。アドレスをご確認ください。</translation>
        </message>
        <message>
            <source>{0} is not an address of a server: it must begin with http:// or https://.</source>
            <translation>{0}はサーバーのアドレスではありません。http://またはhttps://で始めてください。</translation>
        </message>
        <message>
            <source>{0} is not an address: enter one such as http://10.0.0.5:8000/v1.</source>
            <translation>{0}はアドレスではありません。http://10.0.0.5:8000/v1 のように入力してください。</translation>
        </message>
        <message>
            <source>There is an endpoint called {0} already, or nearly so: choose another name.</source>
            <translation>{0}という名前（またはよく似た名前）のサーバーがすでにあります。別の名前を選んでください。</translation>
        </message>
        <message>
            <source>This is not a key: copy it again, in one piece and without spaces.</source>
            <translation>これはキーではありません。空白なしで全体をもう一度コピーしてください。</translation>
        </message>
        <message>
            <source>This is not a token: copy it again from the hub's settings page, in one piece.</source>
            <translation>これはトークンではありません。Hubの設定ページから全体をもう一度コピーしてください。</translation>
        </message>
        <message>
            <source>This file holds no certificate in PEM.</source>
            <translation>このファイルにPEM形式の証明書がありません。</translation>
        </message>
        <message>
            <source>{0} has no rows: there is nothing to answer.</source>
            <translation>{0}に行がありません。回答するものがありません。</translation>
        </message>
        <message>
            <source>{0} cannot be written ({1}): choose another output.</source>
            <translation>{0}に書き込めません（{1}）。別の出力先を選んでください。</translation>
        </message>
        <message>
            <source>{0} is within the input: choose another output.</source>
            <translation>{0}は入力の中にあります。別の出力先を選んでください。</translation>
        </message>
        <message>
            <source>{0} is protected by a password or is an old .xls: save it as .xlsx without a password.</source>
            <translation>{0}はパスワードで保護されているか、古い.xlsです。パスワードなしの.xlsxで保存してください。</translation>
        </message>
        <message>
            <source>Another run is working on the job of {0}: wait for it or stop it first.</source>
            <translation>別の実行が{0}のジョブを処理しています。終わるまで待つか、先に停止してください。</translation>
        </message>
        <message>
            <source>{0} was stopped.</source>
            <translation>{0} は停止されました。</translation>
        </message>
        <message>
            <source>{0} failed: {1}.</source>
            <translation>{0} は失敗しました：{1}。</translation>
        </message>
    </context>
    <context>
        <name>EngineCard</name>
        <message>
            <source>First, the engine</source>
            <translation>まずはエンジン</translation>
        </message>
        <message>
            <source>Progress of the engine</source>
            <translation>エンジンの進行状況</translation>
        </message>
        <message>
            <source>Get the engine and the starter</source>
            <translation>エンジンとスターターモデルを入手</translation>
        </message>
        <message>
            <source>Engine only</source>
            <translation>エンジンのみ</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>再開</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>再試行</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>一時停止</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Use a file…</source>
            <translation>ファイルを使う…</translation>
        </message>
        <message>
            <source>For a computer without a network: files that another computer has fetched</source>
            <translation>ネットワークのないコンピューター用: 別のコンピューターで取得したファイル</translation>
        </message>
        <message>
            <source>Mirror and proxy…</source>
            <translation>ミラーとプロキシ…</translation>
        </message>
        <message>
            <source>The engine's files (*.zip *.whl)</source>
            <translation>エンジンのファイル (*.zip *.whl)</translation>
        </message>
        <message>
            <source>The engine's files</source>
            <translation>エンジンのファイル</translation>
        </message>
    </context>
    <context>
        <name>EngineClient</name>
        <message>
            <source>The engine was restarted before this request was done.</source>
            <translation>このリクエストが終わる前にエンジンが再起動されました。</translation>
        </message>
        <message>
            <source>The engine is not running; start it first.</source>
            <translation>エンジンが動いていません。先に起動してください。</translation>
        </message>
        <message>
            <source>The engine uses protocol version {0} and this window version {1}: two installations are mixed, so reinstall Switchyard.</source>
            <translation>エンジンのプロトコルはバージョン{0}、このウィンドウはバージョン{1}です。2つのインストールが混在しています。Switchyardを再インストールしてください。</translation>
        </message>
        <message>
            <source>The engine was stopped before this request was done.</source>
            <translation>このリクエストが終わる前にエンジンが停止されました。</translation>
        </message>
        <message>
            <source>The engine has not responded for {0} seconds: wait, or restart it.</source>
            <translation>エンジンが{0}秒間応答していません。待つか、再起動してください。</translation>
        </message>
        <message>
            <source>A file of {0} became shorter, or its disk failed, while it was in use. Put the whole file back, then restart the engine.</source>
            <translation>{0} のファイルが使用中に短くなったか、ディスクに障害が発生しました。完全なファイルを元に戻してから、エンジンを再起動してください。</translation>
        </message>
        <message>
            <source>The engine exited unexpectedly (code {0}); see its log for details.</source>
            <translation>エンジンが予期せず終了しました（コード{0}）。詳細はログをご覧ください。</translation>
        </message>
        <message>
            <source>The engine crashed (status {0}).</source>
            <translation>エンジンがクラッシュしました（ステータス{0}）。</translation>
        </message>
        <message>
            <source>The engine was killed (signal 9), perhaps for lack of memory.</source>
            <translation>エンジンがシステムに強制終了されました（シグナル9）。メモリ不足の可能性があります。</translation>
        </message>
        <message>
            <source>The engine crashed (signal 4): this processor lacks an instruction that it used.</source>
            <translation>エンジンがクラッシュしました（シグナル4）。使われた命令がこのプロセッサにありません。</translation>
        </message>
        <message>
            <source>The engine crashed (signal {0}: {1}).</source>
            <translation>エンジンがクラッシュしました（シグナル{0}: {1}）。</translation>
        </message>
    </context>
    <context>
        <name>EnginePart</name>
        <message>
            <source>The installation was stopped. Nothing is lost: try again.</source>
            <translation>インストールが中断されました。失われたものはありません。もう一度お試しください。</translation>
        </message>
    </context>
    <context>
        <name>ExpertCard</name>
        <message>
            <source>Expert map</source>
            <translation>エキスパートマップ</translation>
        </message>
        <message>
            <source>A model like this has many small parts in each layer, called experts, and every token uses only a few of them. Each square is one expert: the stronger its colour, the more it is used; its pattern shows where it is stored.</source>
            <translation>このようなモデルは、各レイヤーにエキスパートと呼ばれる小さな部分を多数持ち、1つのトークンはそのうち数個だけを使います。1つの四角が1つのエキスパートで、色が濃いほどよく使われ、模様は置き場所を示します。</translation>
        </message>
        <message>
            <source>By use</source>
            <translation>使用順</translation>
        </message>
        <message>
            <source>Sort each layer's experts by use instead of by number</source>
            <translation>各レイヤーのエキスパートを番号順ではなく使用順に並べます</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>表</translation>
        </message>
        <message>
            <source>The same experts as numbers, sorted by any column</source>
            <translation>同じエキスパートを数値で表示（列ごとに並べ替え可能）</translation>
        </message>
        <message>
            <source>Show the experts as a table</source>
            <translation>エキスパートを表で表示</translation>
        </message>
        <message>
            <source>Time in the recorded session</source>
            <translation>記録されたセッションの時点</translation>
        </message>
        <message>
            <source>Scrubs through the session's maps</source>
            <translation>セッションのマップをたどります</translation>
        </message>
        <message>
            <source>Load a model with experts and ask something: each square is an expert.</source>
            <translation>エキスパートのあるモデルを読み込んで質問してください。四角1つが1つのエキスパートです。</translation>
        </message>
        <message>
            <source>{0} × {1}</source>
            <translation>{0} × {1}</translation>
        </message>
        <message>
            <source>{0} layers with {1} experts each</source>
            <translation>{0}レイヤー、各{1}エキスパート</translation>
        </message>
        <message>
            <source>Experts as a table</source>
            <translation>エキスパートの表</translation>
        </message>
    </context>
    <context>
        <name>ExpertMap</name>
        <message>
            <source>in VRAM</source>
            <translation>VRAM内</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>取得中</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>RAM内</translation>
        </message>
        <message>
            <source>on disk</source>
            <translation>ディスク上</translation>
        </message>
    </context>
    <context>
        <name>ExpertMapView</name>
        <message>
            <source>Expert map</source>
            <translation>エキスパートマップ</translation>
        </message>
        <message>
            <source>Layers by experts. Arrow keys move from expert to expert.</source>
            <translation>レイヤー×エキスパート。矢印キーでエキスパート間を移動します。</translation>
        </message>
        <message>
            <source>Layer {0}, expert {1}</source>
            <translation>レイヤー{0}、エキスパート{1}</translation>
        </message>
        <message>
            <source>used {0} times</source>
            <translation>{0}回使用</translation>
        </message>
        <message>
            <source>hit {0}%</source>
            <translation>ヒット{0}%</translation>
        </message>
        <message>
            <source>never used</source>
            <translation>未使用</translation>
        </message>
        <message>
            <source>last {0} steps ago</source>
            <translation>最後は{0}ステップ前</translation>
        </message>
    </context>
    <context>
        <name>ExpertTable</name>
        <message>
            <source>Layer</source>
            <translation>レイヤー</translation>
        </message>
        <message>
            <source>Expert</source>
            <translation>エキスパート</translation>
        </message>
        <message>
            <source>Uses</source>
            <translation>使用回数</translation>
        </message>
        <message>
            <source>Hits</source>
            <translation>ヒット</translation>
        </message>
        <message>
            <source>Steps ago</source>
            <translation>ステップ前</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>サイズ</translation>
        </message>
        <message>
            <source>Where</source>
            <translation>場所</translation>
        </message>
    </context>
    <context>
        <name>ExportButton</name>
        <message>
            <source>Export</source>
            <translation>エクスポート</translation>
        </message>
        <message>
            <source>Contains no text of prompts or answers</source>
            <translation>プロンプトや回答のテキストは含まれません</translation>
        </message>
        <message>
            <source>Trace for Perfetto and Chrome (JSON)…</source>
            <translation>PerfettoとChrome用のトレース (JSON)…</translation>
        </message>
        <message>
            <source>Tables of spans and steps (CSV)…</source>
            <translation>区間とステップの表 (CSV)…</translation>
        </message>
        <message>
            <source>Picture (PNG)…</source>
            <translation>画像 (PNG)…</translation>
        </message>
        <message>
            <source>Drawing (SVG)…</source>
            <translation>図 (SVG)…</translation>
        </message>
        <message>
            <source>Nothing to export yet: ask something in Chat first.</source>
            <translation>まだエクスポートするものがありません。先にチャットで質問してください。</translation>
        </message>
        <message>
            <source>{0} spans written to {1}</source>
            <translation>{0}個の区間を{1}に書き込みました</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>{0}に保存しました</translation>
        </message>
        <message>
            <source>{0} could not be written; choose another folder.</source>
            <translation>{0}に書き込めませんでした。別のフォルダーを選んでください。</translation>
        </message>
        <message>
            <source>{0} could not be written ({1}); choose another folder.</source>
            <translation>{0}に書き込めませんでした（{1}）。別のフォルダーを選んでください。</translation>
        </message>
    </context>
    <context>
        <name>FindBar</name>
        <message>
            <source>Find in this chat</source>
            <translation>このチャット内を検索</translation>
        </message>
        <message>
            <source>Previous match  Shift+F3</source>
            <translation>前の一致  Shift+F3</translation>
        </message>
        <message>
            <source>Next match  F3</source>
            <translation>次の一致  F3</translation>
        </message>
        <message>
            <source>Close  Esc</source>
            <translation>閉じる  Esc</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>looking…</source>
            <translation>検索中…</translation>
        </message>
        <message>
            <source>not in this chat</source>
            <translation>このチャットにはありません</translation>
        </message>
    </context>
    <context>
        <name>FirstRun</name>
        <message>
            <source>{0} with {1}</source>
            <translation>{0}（{1}）</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1コア</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0}コア</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of RAM, {1}</source>
            <translation>RAM {0}、{1}</translation>
        </message>
        <message>
            <source>{0} free on the disk for models</source>
            <translation>モデル用のディスク空き {0}</translation>
        </message>
        <message>
            <source>Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which takes longer.</source>
            <translation>約{0}までのモデルはメモリ上で動きます。それより大きいモデルは、回答中に一部をディスクから読むため時間がかかります。</translation>
        </message>
        <message>
            <source>This processor has no AVX2: everything works, but takes several times as long.</source>
            <translation>このプロセッサにはAVX2がありません。すべて動作しますが、数倍の時間がかかります。</translation>
        </message>
        <message>
            <source>Graphics card and processor share the work.</source>
            <translation>グラフィックスカードとプロセッサで処理を分担します。</translation>
        </message>
        <message>
            <source>The graphics card cannot be used here: the processor does the work.</source>
            <translation>グラフィックスカードはここでは使えません。プロセッサで処理します。</translation>
        </message>
        <message>
            <source>There is no graphics card for models: the processor does the work.</source>
            <translation>モデルに使えるグラフィックスカードがありません。プロセッサで処理します。</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>このPCを調べています…</translation>
        </message>
        <message>
            <source>no graphics card that PyTorch can use</source>
            <translation>PyTorchで使えるグラフィックスカードなし</translation>
        </message>
        <message>
            <source>Found: {0}. Everything is here already, and is prepared for this version.</source>
            <translation>検出: {0}。必要なものはすべて揃っており、このバージョン用に準備されます。</translation>
        </message>
        <message>
            <source>It is fetched once: {0}, about {1} on the disk when it is unpacked.</source>
            <translation>ダウンロードは一度だけです: {0}、展開後は約{1}。</translation>
        </message>
        <message>
            <source>The engine with PyTorch for {0} suits this PC.</source>
            <translation>このPCには{0}用PyTorchのエンジンが適しています。</translation>
        </message>
        <message>
            <source>Found: {0}. The engine comes with PyTorch for {1}.</source>
            <translation>検出: {0}。エンジンには{1}用のPyTorchが付属します。</translation>
        </message>
        <message>
            <source>Checking what was fetched…</source>
            <translation>取得したファイルを確認しています…</translation>
        </message>
        <message>
            <source>Unpacking…</source>
            <translation>展開しています…</translation>
        </message>
        <message>
            <source>Testing it on this PC…</source>
            <translation>このPCでテストしています…</translation>
        </message>
        <message>
            <source>Finishing…</source>
            <translation>仕上げています…</translation>
        </message>
        <message>
            <source>Installing…</source>
            <translation>インストールしています…</translation>
        </message>
    </context>
    <context>
        <name>FirstRunPage</name>
        <message>
            <source>This PC</source>
            <translation>このPC</translation>
        </message>
        <message>
            <source>Recommended for this PC</source>
            <translation>このPCへのおすすめ</translation>
        </message>
        <message>
            <source>Just try the starter</source>
            <translation>まずスターターモデルを試す</translation>
        </message>
        <message>
            <source>A small Mixture of Experts that runs on any machine, converted here from a PyPI package, for a first look. It gets facts wrong and may repeat itself.</source>
            <translation>どのマシンでも動く小さなMixture of Experts。PyPIパッケージからここで変換したお試し用です。事実を誤ったり、同じ内容を繰り返したりすることがあります。</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>このPCを調べています…</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>最初のモデルを選択</translation>
        </message>
        <message>
            <source>Welcome to Switchyard</source>
            <translation>Switchyardへようこそ</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>モデルファイルを開く…</translation>
        </message>
        <message>
            <source>Search for others…</source>
            <translation>ほかを探す…</translation>
        </message>
        <message>
            <source>Use a remote server…</source>
            <translation>リモートサーバーを使う…</translation>
        </message>
        <message>
            <source>Go to the chats</source>
            <translation>チャットへ進む</translation>
        </message>
        <message>
            <source>First the engine, then a model. Nothing is downloaded before you click.</source>
            <translation>まずエンジン、次にモデルです。クリックするまで何もダウンロードされません。</translation>
        </message>
        <message>
            <source>Choose a first model. Nothing is downloaded before you click.</source>
            <translation>最初のモデルを選んでください。クリックするまで何もダウンロードされません。</translation>
        </message>
        <message>
            <source>No model of the catalogue suits this PC: the starter runs everywhere.</source>
            <translation>カタログにこのPCに合うモデルがありません。スターターモデルはどこでも動きます。</translation>
        </message>
    </context>
    <context>
        <name>Fit</name>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>{0} MB</source>
            <translation>{0} MB</translation>
        </message>
        <message>
            <source>Fast</source>
            <translation>高速</translation>
        </message>
        <message>
            <source>Works</source>
            <translation>動作</translation>
        </message>
        <message>
            <source>Batch only</source>
            <translation>バッチのみ</translation>
        </message>
        <message>
            <source>Too large</source>
            <translation>大きすぎ</translation>
        </message>
        <message>
            <source>original</source>
            <translation>オリジナル</translation>
        </message>
        <message>
            <source>near-original</source>
            <translation>ほぼオリジナル</translation>
        </message>
        <message>
            <source>good quality</source>
            <translation>良い品質</translation>
        </message>
        <message>
            <source>fair quality</source>
            <translation>まずまずの品質</translation>
        </message>
        <message>
            <source>poor quality</source>
            <translation>低い品質</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} トークン/秒</translation>
        </message>
        <message>
            <source>about {0} tokens/s</source>
            <translation>約{0} トークン/秒</translation>
        </message>
        <message>
            <source>measured here</source>
            <translation>ここで実測</translation>
        </message>
        <message>
            <source>estimated, {0} to {1}</source>
            <translation>推定、{0}～{1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>最初のトークンまで{0}秒</translation>
        </message>
        <message>
            <source>first token after about {0} s</source>
            <translation>最初のトークンまで約{0}秒</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the graphics card, {1}</source>
            <translation>画像: グラフィックスカードで 1 枚あたり約 {0} 秒、{1}</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the CPU, {1}</source>
            <translation>画像: CPU で 1 枚あたり約 {0} 秒、{1}</translation>
        </message>
        <message>
            <source>download</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>converted weights</source>
            <translation>変換済みの重み</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>ディスク</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>ライブラリ</translation>
        </message>
        <message>
            <source>recommended</source>
            <translation>おすすめ</translation>
        </message>
        <message numerus="yes">
            <source>{0} and {1} more</source>
            <translation>
                <numerusform>{0}、ほか{1}件</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} GB/s</source>
            <translation>{0} GB/s</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0}秒</translation>
        </message>
        <message>
            <source>{0} min</source>
            <translation>{0}分</translation>
        </message>
        <message>
            <source>{0} h {1} min</source>
            <translation>{0}時間{1}分</translation>
        </message>
        <message>
            <source>{0} h</source>
            <translation>{0}時間</translation>
        </message>
        <message numerus="yes">
            <source>{0} days</source>
            <translation>
                <numerusform>{0}日</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} MB/s</source>
            <translation>{0} MB/s</translation>
        </message>
    </context>
    <context>
        <name>FitCardView</name>
        <message>
            <source>Context in tokens</source>
            <translation>コンテキスト（トークン）</translation>
        </message>
        <message>
            <source>Memory for the expert cache</source>
            <translation>エキスパートキャッシュ用メモリ</translation>
        </message>
        <message>
            <source>VRAM to use</source>
            <translation>使用するVRAM</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>Load anyway…</source>
            <translation>それでも読み込む…</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>使用するRAM</translation>
        </message>
        <message>
            <source>Reading what the repository holds…</source>
            <translation>リポジトリの内容を読んでいます…</translation>
        </message>
        <message>
            <source>Reading headers: {0} of {1} files…</source>
            <translation>ヘッダーを読んでいます: {1}ファイル中{0}…</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} トークン</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>空きすべて</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>最大{0}</translation>
        </message>
        <message>
            <source>runs in {0}</source>
            <translation>{0}で実行</translation>
        </message>
        <message>
            <source>keys and values of that context: {0}</source>
            <translation>そのコンテキストのキーとバリュー: {0}</translation>
        </message>
        <message>
            <source>Download {0}</source>
            <translation>{0}をダウンロード</translation>
        </message>
        <message>
            <source>Downloading {0}</source>
            <translation>{0}をダウンロード中</translation>
        </message>
        <message>
            <source>Load {0}</source>
            <translation>{0}を読み込む</translation>
        </message>
        <message>
            <source>Load {0} anyway</source>
            <translation>{0}をそれでも読み込む</translation>
        </message>
        <message>
            <source>There is no {0} here. {1} would be downloaded: choose another row to take that one.</source>
            <translation>ここに{0}はありません。{1}がダウンロードされます。そちらにするには別の行を選んでください。</translation>
        </message>
        <message>
            <source>No file was named. {0} would be downloaded: choose another row to take that one.</source>
            <translation>ファイルが指定されていません。{0}がダウンロードされます。そちらにするには別の行を選んでください。</translation>
        </message>
        <message>
            <source>Context</source>
            <translation>コンテキスト</translation>
        </message>
    </context>
    <context>
        <name>FitDelegate</name>
        <message>
            <source>recommended</source>
            <translation>おすすめ</translation>
        </message>
    </context>
    <context>
        <name>FitTable</name>
        <message>
            <source>File</source>
            <translation>ファイル</translation>
        </message>
        <message>
            <source>Memory</source>
            <translation>メモリ</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>速度</translation>
        </message>
        <message>
            <source>On this PC</source>
            <translation>このPC</translation>
        </message>
        <message>
            <source>Files, and how they would run here</source>
            <translation>ファイルと、ここでの動作の見込み</translation>
        </message>
    </context>
    <context>
        <name>FoldCard</name>
        <message>
            <source>Edit the summary</source>
            <translation>要約を編集</translation>
        </message>
        <message>
            <source>Summarise again</source>
            <translation>要約し直す</translation>
        </message>
        <message>
            <source>Send the turns again</source>
            <translation>やり取りを再び送信</translation>
        </message>
        <message>
            <source>The model reads the turns themselves again, as far as they fit.</source>
            <translation>収まる範囲で、モデルが再びやり取りそのものを読みます。</translation>
        </message>
        <message>
            <source>Hide the turns</source>
            <translation>やり取りを隠す</translation>
        </message>
        <message>
            <source>Show the turns</source>
            <translation>やり取りを表示</translation>
        </message>
        <message>
            <source>Write a summary</source>
            <translation>要約を書く</translation>
        </message>
        <message>
            <source>Summary of the earlier turns</source>
            <translation>以前のやり取りの要約</translation>
        </message>
        <message>
            <source>Summary of one earlier turn</source>
            <translation>以前のやり取り1件の要約</translation>
        </message>
        <message numerus="yes">
            <source>Summary of {0} earlier turns</source>
            <translation>
                <numerusform>以前のやり取り{0}件の要約</numerusform>
            </translation>
        </message>
        <message>
            <source>One earlier turn is left out</source>
            <translation>以前のやり取り1件を除外中</translation>
        </message>
        <message numerus="yes">
            <source>{0} earlier turns are left out</source>
            <translation>
                <numerusform>以前のやり取り{0}件を除外中</numerusform>
            </translation>
        </message>
        <message>
            <source>These turns were changed since the summary was made.</source>
            <translation>要約の作成後に、これらのやり取りが変更されました。</translation>
        </message>
        <message>
            <source>The model reads nothing of them. They are kept, and can be sent again.</source>
            <translation>モデルはこれらを読みません。内容は保持され、再び送信できます。</translation>
        </message>
        <message>
            <source>you</source>
            <translation>あなた</translation>
        </message>
        <message>
            <source>The model reads this instead of the turns, which are kept. Written by {0}.</source>
            <translation>モデルはやり取りの代わりにこれを読みます。やり取りは保持されます。作成: {0}。</translation>
        </message>
    </context>
    <context>
        <name>FolderChoice</name>
        <message>
            <source>Download folder</source>
            <translation>ダウンロード先のフォルダー</translation>
        </message>
        <message>
            <source>Download to</source>
            <translation>ダウンロード先</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>ライブラリ</translation>
        </message>
        <message>
            <source>not connected</source>
            <translation>未接続</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>空き{0}</translation>
        </message>
    </context>
    <context>
        <name>FoldersDialog</name>
        <message>
            <source>Model folders</source>
            <translation>モデルのフォルダー</translation>
        </message>
        <message>
            <source>Models in these folders are listed and used where they lie. The Models page asks which of them a download goes into. Those of LM Studio, Ollama, Jan, GPT4All and the hub's own cache are found automatically.</source>
            <translation>これらのフォルダーのモデルは、置かれた場所のまま一覧に表示され、使われます。ダウンロード先は「モデル」ページで選べます。LM Studio、Ollama、Jan、GPT4AllとHubのキャッシュは自動で見つかります。</translation>
        </message>
        <message>
            <source>Add a folder…</source>
            <translation>フォルダーを追加…</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>一覧から外す</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>開く</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Folder with models</source>
            <translation>モデルのあるフォルダー</translation>
        </message>
    </context>
    <context>
        <name>FormFoot</name>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Start</source>
            <translation>開始</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>確認中…</translation>
        </message>
    </context>
    <context>
        <name>FoundList</name>
        <message>
            <source>Models to get</source>
            <translation>入手できるモデル</translation>
        </message>
    </context>
    <context>
        <name>HelpMark</name>
        <message>
            <source>What is “{0}”?</source>
            <translation>「{0}」とは?</translation>
        </message>
    </context>
    <context>
        <name>HereCard</name>
        <message>
            <source>Already on this PC</source>
            <translation>すでにこのPCにあるもの</translation>
        </message>
        <message>
            <source>One more is on the Models page.</source>
            <translation>ほかに1つが「モデル」ページにあります。</translation>
        </message>
        <message numerus="yes">
            <source>{0} more are on the Models page.</source>
            <translation>
                <numerusform>ほかに{0}個が「モデル」ページにあります。</numerusform>
            </translation>
        </message>
        <message>
            <source>Use</source>
            <translation>使う</translation>
        </message>
        <message>
            <source>Use {0}</source>
            <translation>{0}を使う</translation>
        </message>
    </context>
    <context>
        <name>HubCard</name>
        <message>
            <source>Finding models</source>
            <translation>モデルの検索</translation>
        </message>
        <message>
            <source>Load from file…</source>
            <translation>ファイルから読み込む…</translation>
        </message>
        <message>
            <source>Catalogue of recommendations</source>
            <translation>おすすめのカタログ</translation>
        </message>
        <message>
            <source>Asked instead of Hugging Face, also on the command line.</source>
            <translation>Hugging Faceの代わりに問い合わせます。コマンドラインでも同じです。</translation>
        </message>
        <message>
            <source>HF_ENDPOINT in the environment names {0}, which is used.</source>
            <translation>環境変数HF_ENDPOINTに{0}が指定されており、それが使われます。</translation>
        </message>
        <message>
            <source>Mirror of the hub</source>
            <translation>Hubのミラー</translation>
        </message>
        <message>
            <source>PyPI and PyTorch</source>
            <translation>PyPIとPyTorch</translation>
        </message>
        <message>
            <source>Where the engine of an installed Switchyard is fetched from instead.</source>
            <translation>インストール版Switchyardのエンジンの取得先を置き換えます。</translation>
        </message>
        <message>
            <source>Mirror of packages</source>
            <translation>パッケージのミラー</translation>
        </message>
        <message>
            <source>the system's</source>
            <translation>システムの設定</translation>
        </message>
        <message>
            <source>For everything from the network; where it wants a login, as http://NAME:PASSWORD@HOST:PORT.</source>
            <translation>ネットワークからのすべての取得に使います。ログインが必要な場合は http://NAME:PASSWORD@HOST:PORT の形式です。</translation>
        </message>
        <message>
            <source>Proxy</source>
            <translation>プロキシ</translation>
        </message>
        <message>
            <source>None is kept. One is asked for when a model needs it.</source>
            <translation>保存されたものはありません。モデルに必要なときに入力を求めます。</translation>
        </message>
        <message>
            <source>In the system's keyring, or for this run only where there is none.</source>
            <translation>システムのキーリングに保存します。ない場合は今回の実行中のみです。</translation>
        </message>
        <message>
            <source>Access tokens</source>
            <translation>アクセストークン</translation>
        </message>
        <message>
            <source>A newer catalogue</source>
            <translation>新しいカタログ</translation>
        </message>
        <message>
            <source>Catalogues (*.json)</source>
            <translation>カタログ (*.json)</translation>
        </message>
        <message>
            <source>{0} models, as of {1}.</source>
            <translation>{0}モデル、{1}現在。</translation>
        </message>
        <message>
            <source>The token of another program is still used for {0}: see “hf auth logout”, or HF_TOKEN.</source>
            <translation>{0}には引き続き別のプログラムのトークンが使われます。「hf auth logout」またはHF_TOKENをご覧ください。</translation>
        </message>
    </context>
    <context>
        <name>InputCard</name>
        <message>
            <source>Another file…</source>
            <translation>別のファイル…</translation>
        </message>
        <message>
            <source>First rows of the file</source>
            <translation>ファイルの最初の行</translation>
        </message>
        <message>
            <source>Encoding</source>
            <translation>文字コード</translation>
        </message>
        <message>
            <source>Encoding: automatic</source>
            <translation>文字コード: 自動</translation>
        </message>
        <message>
            <source>Separator</source>
            <translation>区切り文字</translation>
        </message>
        <message>
            <source>Separator: automatic</source>
            <translation>区切り文字: 自動</translation>
        </message>
        <message>
            <source>tab</source>
            <translation>タブ</translation>
        </message>
        <message>
            <source>Sheet</source>
            <translation>シート</translation>
        </message>
        <message>
            <source>A text file is one row</source>
            <translation>テキストファイル全体を1行とする</translation>
        </message>
        <message>
            <source>Otherwise each line is a row</source>
            <translation>オフの場合、テキストの各行が1行になります</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>ファイルを読み込んでいます…</translation>
        </message>
        <message>
            <source>An OpenAI batch file: rows have their own messages and settings; answers are in OpenAI's format.</source>
            <translation>OpenAIのバッチファイルです。行ごとにメッセージと設定があり、回答はOpenAIの形式になります。</translation>
        </message>
        <message>
            <source>Sheet: {0}</source>
            <translation>シート: {0}</translation>
        </message>
        <message>
            <source>Some rows are not valid text in this encoding: choose another below the table.</source>
            <translation>この文字コードでは正しく読めない行があります。表の下で別のものを選んでください。</translation>
        </message>
        <message>
            <source>Some of the first rows cannot be answered: one {0}.</source>
            <translation>最初の行の中に回答できないものがあります。その1つ: {0}。</translation>
        </message>
        <message>
            <source>1 column</source>
            <translation>1列</translation>
        </message>
        <message numerus="yes">
            <source>{0} columns</source>
            <translation>
                <numerusform>{0}列</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1行</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0}行</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Installation</name>
        <message>
            <source>The installation could not be started: install Switchyard again.</source>
            <translation>インストールを開始できませんでした。Switchyardをもう一度インストールしてください。</translation>
        </message>
    </context>
    <context>
        <name>JobDelegate</name>
        <message>
            <source>{0} failed</source>
            <translation>失敗 {0}</translation>
        </message>
    </context>
    <context>
        <name>JobStrip</name>
        <message>
            <source>Jobs</source>
            <translation>ジョブ</translation>
        </message>
    </context>
    <context>
        <name>Kept</name>
        <message>
            <source>{0} was damaged; it is kept as {1}, and a new one is begun.</source>
            <translation>{0}が壊れていました。{1}として残し、新しいファイルを始めます。</translation>
        </message>
        <message>
            <source>{0} could not be read ({1}): what you keep now is lost when the window closes.</source>
            <translation>{0}を読めませんでした（{1}）。今保存する内容はウィンドウを閉じると失われます。</translation>
        </message>
        <message>
            <source>{0} could not be saved ({1}); free some space or check its permissions.</source>
            <translation>{0}を保存できませんでした（{1}）。空きを増やすか、アクセス権をご確認ください。</translation>
        </message>
    </context>
    <context>
        <name>KeptCard</name>
        <message>
            <source>Continuing chats</source>
            <translation>チャットの継続</translation>
        </message>
        <message>
            <source>Clear</source>
            <translation>消去</translation>
        </message>
        <message>
            <source>Clear kept context</source>
            <translation>保存済みのコンテキストを消去</translation>
        </message>
        <message>
            <source>Now</source>
            <translation>現在</translation>
        </message>
        <message>
            <source>{0} of all chats and models together.</source>
            <translation>全チャット・全モデルの合計で{0}。</translation>
        </message>
        <message>
            <source>Nothing is kept.</source>
            <translation>保存されたものはありません。</translation>
        </message>
        <message>
            <source>The folder cannot be changed: {0}</source>
            <translation>フォルダーを変更できません: {0}</translation>
        </message>
    </context>
    <context>
        <name>Lane</name>
        <message>
            <source>Phase</source>
            <translation>フェーズ</translation>
        </message>
        <message>
            <source>What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a batch step, which takes many rows through the model at once. Each tick is a token: a word or a part of one.</source>
            <translation>モデルの動作です。プロンプトを読む（プリフィル）、回答をトークンごとに書く（デコード）、または多くの行を一度に通すバッチのステップ。目盛り1つが1トークン、つまり語またはその一部です。</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>リクエスト</translation>
        </message>
        <message>
            <source>A row for each answer that is being worked on, for this window or other programs, here or at another server: waiting (hatched), its prompt being read (pale), its answer being written. A batch job has a row, too (outlined).</source>
            <translation>処理中の回答ごとに1行です。このウィンドウやほかのプログラム、ここやほかのサーバーのものを含みます。待機中（斜線）、プロンプトを読み取り中（淡色）、回答を生成中。バッチジョブも1行になります（枠線）。</translation>
        </message>
        <message>
            <source>Sweeps</source>
            <translation>スイープ</translation>
        </message>
        <message>
            <source>What goes through the layers together: one token of each answer that is being written, and (hatched) pieces of prompts that are being read. Batch jobs have sweeps of their own. From close up each sweep is a block with its tokens.</source>
            <translation>レイヤーを一緒に通るものです。生成中の各回答の1トークンと、読み取り中のプロンプトの断片（斜線）。バッチジョブには独自のスイープがあります。拡大すると、各スイープがトークンを含むブロックになります。</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>How busy the graphics card is with our model. In gaps it waits for something else, usually for weights or for the processor.</source>
            <translation>モデルがグラフィックスカードをどれだけ使っているか。すき間では、主に重みやプロセッサを待っています。</translation>
        </message>
        <message>
            <source>computing on the GPU</source>
            <translation>GPUでの計算</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>GPUへ</translation>
        </message>
        <message>
            <source>Weights being copied from RAM to the graphics card. This is the cost of a miss: an expert that is needed but not in the card's memory.</source>
            <translation>RAMからグラフィックスカードへコピー中の重み。これがミスの代償で、必要なエキスパートがカードのメモリになかったことを示します。</translation>
        </message>
        <message>
            <source>copying weights to the GPU</source>
            <translation>GPUへの重みのコピー</translation>
        </message>
        <message>
            <source>to the GPU</source>
            <translation>GPUへ</translation>
        </message>
        <message>
            <source>passing results to the GPU</source>
            <translation>GPUへの結果の受け渡し</translation>
        </message>
        <message>
            <source>results</source>
            <translation>結果</translation>
        </message>
        <message>
            <source>From the GPU</source>
            <translation>GPUから</translation>
        </message>
        <message>
            <source>Copies from the graphics card to RAM, mostly small results. Large amounts are a batch's data that has no room on the card.</source>
            <translation>グラフィックスカードからRAMへのコピー。多くは小さな結果です。大量の場合は、カードに入りきらないバッチのデータです。</translation>
        </message>
        <message>
            <source>copying from the GPU</source>
            <translation>GPUからのコピー</translation>
        </message>
        <message>
            <source>from the GPU</source>
            <translation>GPUから</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>How busy the processor is with our model: with experts, the parts of a layer of which each token uses only a few, and with attention, which looks back at the text so far. Together they can fill the lane.</source>
            <translation>モデルがプロセッサをどれだけ使っているか。各トークンが数個だけ使うレイヤーの部分であるエキスパートと、それまでのテキストを振り返るアテンションです。合わせてレーンを埋めることがあります。</translation>
        </message>
        <message>
            <source>computing experts on the CPU</source>
            <translation>CPUでのエキスパートの計算</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>CPUエキスパート</translation>
        </message>
        <message>
            <source>attention and other layers on the CPU</source>
            <translation>CPUでのアテンションとほかのレイヤー</translation>
        </message>
        <message>
            <source>CPU attention</source>
            <translation>CPUアテンション</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>画像</translation>
        </message>
        <message>
            <source>Pictures being turned into tokens by the part of the model that sees, on the graphics card or the processor. Each is read once: the next question about it begins at once.</source>
            <translation>モデルの画像を見る部分が、グラフィックスカードまたはプロセッサーで画像をトークンに変換しています。どの画像も読み取りは 1 回だけで、同じ画像への次の質問はすぐに始まります。</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>画像の読み取り</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>画像</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>ディスク</translation>
        </message>
        <message>
            <source>Experts being read from disk because RAM has no room for them. If this lane is often full, more RAM or a lower precision helps most.</source>
            <translation>RAMに空きがなく、ディスクから読み込んでいるエキスパート。このレーンがよく埋まる場合は、RAMの増設か精度を下げるのが最も効果的です。</translation>
        </message>
        <message>
            <source>reading from disk</source>
            <translation>ディスクの読み取り</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>ディスク</translation>
        </message>
        <message>
            <source>Experts</source>
            <translation>エキスパート</translation>
        </message>
        <message>
            <source>Where the needed experts were: in the card's memory (a hit), copied there first (fetched, a miss), or computed on the processor instead. More hits mean less waiting; without a graphics card everything is computed on the processor.</source>
            <translation>必要なエキスパートのあった場所です。カードのメモリ（ヒット）、先にコピー（取得、ミス）、またはプロセッサで計算。ヒットが多いほど待ち時間が減ります。グラフィックスカードがなければ、すべてプロセッサで計算します。</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>トークン/秒</translation>
        </message>
        <message>
            <source>How many tokens per second are written while the model is working. For a batch this counts the tokens of all rows, including their prompts.</source>
            <translation>モデルの動作中に毎秒何トークン生成されるか。バッチではプロンプトも含む全行のトークンを数えます。</translation>
        </message>
        <message>
            <source>GPU busy</source>
            <translation>GPU使用率</translation>
        </message>
        <message>
            <source>How busy the graphics card is, for all programs.</source>
            <translation>全プログラムによるグラフィックスカードの使用率です。</translation>
        </message>
        <message>
            <source>CPU busy</source>
            <translation>CPU使用率</translation>
        </message>
        <message>
            <source>How busy the whole processor is: filled for Switchyard, dashed for all programs. A wide gap between the two is what other programs use.</source>
            <translation>プロセッサ全体の使用率です。塗りつぶしはSwitchyard、破線は全プログラム。両者の差がほかのプログラムの使用分です。</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>使用中のメモリ: 塗りつぶしはSwitchyard、破線は全プログラム。</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>The card's memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>使用中のカードのメモリ: 塗りつぶしはSwitchyard、破線は全プログラム。</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>Traffic on the graphics card's slot, both ways, of all programs.</source>
            <translation>グラフィックスカードのスロットの通信量（双方向、全プログラム）。</translation>
        </message>
        <message>
            <source>Page faults</source>
            <translation>ページフォールト</translation>
        </message>
        <message>
            <source>Memory pages that the system had to map first: many slow things down.</source>
            <translation>システムが先に割り当てる必要のあったメモリページ。多いと遅くなります。</translation>
        </message>
        <message>
            <source>Disk I/O</source>
            <translation>ディスクI/O</translation>
        </message>
        <message>
            <source>Reads from the disk and (dashed) writes to it, of all programs.</source>
            <translation>ディスクの読み取りと書き込み（破線）、全プログラム。</translation>
        </message>
        <message>
            <source>GPU power</source>
            <translation>GPU電力</translation>
        </message>
        <message>
            <source>The power that the graphics card draws.</source>
            <translation>グラフィックスカードの消費電力です。</translation>
        </message>
        <message>
            <source>CPU power</source>
            <translation>CPU電力</translation>
        </message>
        <message>
            <source>The power that the processor draws.</source>
            <translation>プロセッサの消費電力です。</translation>
        </message>
        <message>
            <source>GPU clock</source>
            <translation>GPUクロック</translation>
        </message>
        <message>
            <source>The graphics card's clock rate: it falls when the card is too hot.</source>
            <translation>グラフィックスカードのクロック。熱くなりすぎると下がります。</translation>
        </message>
        <message>
            <source>CPU clock</source>
            <translation>CPUクロック</translation>
        </message>
        <message>
            <source>The processor's clock rate: it falls when too hot or saving power.</source>
            <translation>プロセッサのクロック。熱くなりすぎるか省電力時に下がります。</translation>
        </message>
        <message>
            <source>GPU heat</source>
            <translation>GPU温度</translation>
        </message>
        <message>
            <source>How hot the graphics card is.</source>
            <translation>グラフィックスカードの温度です。</translation>
        </message>
        <message>
            <source>CPU heat</source>
            <translation>CPU温度</translation>
        </message>
        <message>
            <source>How hot the processor is.</source>
            <translation>プロセッサの温度です。</translation>
        </message>
    </context>
    <context>
        <name>Languages</name>
        <message>
            <source>Switchyard does not speak {0} yet, so it is in English. Settings has its languages.</source>
            <translation>Switchyardはまだ{0}に対応していないため、英語で表示しています。使える言語は設定にあります。</translation>
        </message>
    </context>
    <context>
        <name>LicencesDialog</name>
        <message>
            <source>Licences</source>
            <translation>ライセンス</translation>
        </message>
    </context>
    <context>
        <name>Loading</name>
        <message>
            <source>Opening the model</source>
            <translation>モデルを開いています</translation>
        </message>
        <message>
            <source>Reading weights</source>
            <translation>重みを読み込んでいます</translation>
        </message>
        <message>
            <source>Converting weights; later starts skip this</source>
            <translation>重みを変換しています。次回からは省略されます</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>モデルを読み込んでいます</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>残り{0}</translation>
        </message>
    </context>
    <context>
        <name>MachineCard</name>
        <message>
            <source>Machine</source>
            <translation>マシン</translation>
        </message>
        <message>
            <source>Sensor and driver data of the whole machine, other programs included. If the processor is much busier than our share of it, other programs are slowing the model down.</source>
            <translation>ほかのプログラムも含む、マシン全体のセンサーとドライバーの値です。プロセッサの使用率が当アプリの分より大幅に高い場合、ほかのプログラムがモデルを遅くしています。</translation>
        </message>
        <message>
            <source>from sensors and drivers</source>
            <translation>センサーとドライバーの値</translation>
        </message>
        <message>
            <source>Graphics card: no sensor data</source>
            <translation>グラフィックスカード: センサーの値なし</translation>
        </message>
        <message>
            <source>No sensor data yet.</source>
            <translation>センサーの値がまだありません。</translation>
        </message>
        <message>
            <source>CPU {0}%</source>
            <translation>CPU {0}%</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>ours {0}%</source>
            <translation>当アプリ {0}%</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>power not available</source>
            <translation>電力は取得できません</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>Disk {0} MB/s read, {1} MB/s written</source>
            <translation>ディスク 読み取り{0} MB/s、書き込み{1} MB/s</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>使用率{0}%</translation>
        </message>
        <message>
            <source>page faults {0}/s, {1}/s from disk</source>
            <translation>ページフォールト {0}/秒、うちディスク {1}/秒</translation>
        </message>
    </context>
    <context>
        <name>MachineFooter</name>
        <message>
            <source>Memory</source>
            <translation>メモリ</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>No GPU in use</source>
            <translation>GPUは未使用</translation>
        </message>
        <message>
            <source>Show what holds the memory</source>
            <translation>メモリの内訳を表示</translation>
        </message>
        <message>
            <source>Fold the memory into one bar</source>
            <translation>メモリを1本のバーにまとめる</translation>
        </message>
        <message>
            <source>Model: the weights that every token needs. Its experts: those of which each token needs a few. Chat memory: keys and values of conversations (KV). These figures are the engine's; RAM in use and in all are the operating system's.</source>
            <translation>モデル: すべてのトークンに必要な重み。エキスパート: 各トークンが数個だけ使うもの。チャットメモリ: 会話のキーとバリュー（KV）。これらはエンジンの値で、使用中と合計のRAMはOSの値です。</translation>
        </message>
        <message>
            <source>VRAM in use and total: from the driver.</source>
            <translation>使用中と合計のVRAM: ドライバーの値。</translation>
        </message>
        <message>
            <source>Memory of the emulated graphics card: from the engine.</source>
            <translation>エミュレートしたグラフィックスカードのメモリ: エンジンの値。</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Its experts</source>
            <translation>エキスパート</translation>
        </message>
        <message>
            <source>Chat memory</source>
            <translation>チャットメモリ</translation>
        </message>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Other programs</source>
            <translation>ほかのプログラム</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1コア</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0}コア</numerusform>
            </translation>
        </message>
        <message>
            <source>{0}, not in use</source>
            <translation>{0}、未使用</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1スレッド</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0}スレッド</numerusform>
            </translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>チューニング済み</translation>
        </message>
        <message>
            <source>Where the model runs, as reported by the engine.</source>
            <translation>エンジンが報告した、モデルの実行場所です。</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>モデルを読み込んでいます</translation>
        </message>
        <message>
            <source>Loading the model, {0}%</source>
            <translation>モデル読み込み中、{0}%</translation>
        </message>
        <message>
            <source>Starting the engine</source>
            <translation>エンジンを起動しています</translation>
        </message>
        <message>
            <source>No model loaded</source>
            <translation>モデル未読み込み</translation>
        </message>
    </context>
    <context>
        <name>MachinePicture</name>
        <message>
            <source>Picture of this machine</source>
            <translation>このマシンの図</translation>
        </message>
    </context>
    <context>
        <name>MainWindow</name>
        <message>
            <source>Switchyard {0} is available: get it in Settings.</source>
            <translation>Switchyard {0}が利用できます。設定から入手できます。</translation>
        </message>
        <message>
            <source>Everywhere</source>
            <translation>全体</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>コピーしました</translation>
        </message>
        <message>
            <source>The report is in {0}.</source>
            <translation>レポートは{0}にあります。</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>レポートをコピー</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>レポートを保存…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Switchyard hit an error last time. You can copy a report of it, or save one with versions, hardware and logs; neither has prompts, answers or names, and nothing was sent.</source>
            <translation>前回、Switchyardでエラーが発生しました。そのレポートをコピーするか、バージョン、ハードウェア、ログを含むレポートを保存できます。どちらにもプロンプト、回答、名前は含まれず、何も送信されていません。</translation>
        </message>
        <message>
            <source>{0} Your text is kept.</source>
            <translation>{0} テキストは保持されています。</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0}</source>
            <translation>前回のチューニングからハードウェアが変わりました。{0}</translation>
        </message>
        <message>
            <source>{0} now runs at {1} tokens/s, much faster than the {2} that Tune measured: the machine was busy then. Tune again to find the best settings.</source>
            <translation>{0}は現在{1} トークン/秒で動いており、チューニングで計測した{2}よりかなり高速です。当時マシンがほかの処理で忙しかったためです。最適な設定を見つけるには、もう一度チューニングしてください。</translation>
        </message>
        <message>
            <source>The graphics card works again, but the model still runs on the CPU: reload it to use the card.</source>
            <translation>グラフィックスカードが再び使えるようになりましたが、モデルはまだCPUで動いています。カードを使うには再読み込みしてください。</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>エンジンを再起動</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>チューニング</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>モデルを再読み込み</translation>
        </message>
        <message>
            <source>Show these shortcuts</source>
            <translation>ショートカットを表示</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>終了</translation>
        </message>
    </context>
    <context>
        <name>MakingRoom</name>
        <message>
            <source>A batch job is running.</source>
            <translation>バッチジョブを実行中です。</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the job is paused and resumes when tuning ends. No answered row is lost.</source>
            <translation>チューニングはエンジンを占有するため、ジョブは一時停止し、終了後に再開します。回答済みの行は失われません。</translation>
        </message>
        <message>
            <source>Pause it and tune</source>
            <translation>一時停止してチューニング</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0}件のバッチジョブを実行中です。</numerusform>
            </translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the jobs are paused and resume when tuning ends. No answered row is lost.</source>
            <translation>チューニングはエンジンを占有するため、ジョブは一時停止し、終了後に再開します。回答済みの行は失われません。</translation>
        </message>
        <message>
            <source>Pause them and tune</source>
            <translation>一時停止してチューニング</translation>
        </message>
        <message>
            <source>An answer is being written.</source>
            <translation>回答を生成中です。</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself. A stopped answer keeps its text so far.</source>
            <translation>チューニングはエンジンを占有します。停止した回答は、そこまでのテキストが残ります。</translation>
        </message>
        <message>
            <source>Tune after the answer</source>
            <translation>回答の後にチューニング</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>回答を停止</translation>
        </message>
        <message>
            <source>The batch job for {0} stays paused: it began in {1}, and the model now runs in {2}. “Keep as before” lets you resume it.</source>
            <translation>{0}のバッチジョブは一時停止のままです。{1}で始まりましたが、モデルは現在{2}で動いています。「以前のままにする」を選ぶと再開できます。</translation>
        </message>
    </context>
    <context>
        <name>MapLegend</name>
        <message>
            <source>Recent uses: each counts half as much after 128 tokens</source>
            <translation>最近の使用: 128トークン後には1回の重みが半分になります</translation>
        </message>
        <message>
            <source>in VRAM</source>
            <translation>VRAM内</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>RAM内</translation>
        </message>
        <message>
            <source>only on disk</source>
            <translation>ディスクのみ</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>取得中</translation>
        </message>
        <message>
            <source>Dark to yellow: 0 to {0} recent uses</source>
            <translation>暗色から黄色: 最近の使用 0～{0}</translation>
        </message>
        <message>
            <source>recent uses 0</source>
            <translation>最近の使用 0</translation>
        </message>
    </context>
    <context>
        <name>MemoryCard</name>
        <message>
            <source>Memory</source>
            <translation>メモリ</translation>
        </message>
        <message>
            <source>What fills the computer's memory and its graphics card's. Weights and experts are the model itself; KV (keys and values) is what it remembers of the conversation, and grows with its length. Kept context is that of other conversations, which go on at once with it.</source>
            <translation>コンピューターとグラフィックスカードのメモリの内訳です。重みとエキスパートはモデル本体、KV（キーとバリュー）は会話の記憶で、会話が長くなるほど増えます。保存済みコンテキストはほかの会話のもので、すぐに続きを始められます。</translation>
        </message>
        <message>
            <source>Shows a model's memory once one is loaded.</source>
            <translation>モデルが読み込まれると、そのメモリを表示します。</translation>
        </message>
        <message>
            <source>Parts of the model: counted by the engine. Total RAM: reported by the system.</source>
            <translation>モデルの各部: エンジンの集計。RAMの合計: システムの値。</translation>
        </message>
        <message>
            <source>Computed context of chats, of all models, of what it may take (see Settings).</source>
            <translation>全モデルのチャットの計算済みコンテキスト。使用上限に対する割合です（設定を参照）。</translation>
        </message>
        <message>
            <source>Counted by the engine, of the memory it may use.</source>
            <translation>エンジンの集計。使用できるメモリに対する割合です。</translation>
        </message>
        <message>
            <source>free</source>
            <translation>空き</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>ディスク</translation>
        </message>
        <message>
            <source>VRAM (emulated)</source>
            <translation>VRAM（エミュレート）</translation>
        </message>
        <message>
            <source>VRAM {0}</source>
            <translation>VRAM {0}</translation>
        </message>
        <message>
            <source>weights</source>
            <translation>重み</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>エキスパート</translation>
        </message>
        <message>
            <source>conversation (KV)</source>
            <translation>会話（KV）</translation>
        </message>
        <message>
            <source>kept context</source>
            <translation>保存済みコンテキスト</translation>
        </message>
        <message>
            <source>staging</source>
            <translation>転送バッファー</translation>
        </message>
        <message>
            <source>activations</source>
            <translation>アクティベーション</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>画像の読み取り</translation>
        </message>
        <message>
            <source>the engine itself</source>
            <translation>エンジン自体</translation>
        </message>
        <message>
            <source>window and other programs</source>
            <translation>ウィンドウとほかのプログラム</translation>
        </message>
    </context>
    <context>
        <name>MessageEditor</name>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Ctrl+Enter</source>
            <translation>Ctrl+Enter</translation>
        </message>
    </context>
    <context>
        <name>MessageTools</name>
        <message>
            <source>Saved prompts  /</source>
            <translation>保存したプロンプト  /</translation>
        </message>
        <message>
            <source>More for this message</source>
            <translation>このメッセージのその他の操作</translation>
        </message>
        <message>
            <source>Saved prompts…	/</source>
            <translation>保存したプロンプト…	/</translation>
        </message>
        <message>
            <source>Save this message as a prompt…</source>
            <translation>このメッセージをプロンプトとして保存…</translation>
        </message>
        <message>
            <source>Ask two, side by side…	Ctrl+Shift+D</source>
            <translation>2つに並べて質問…	Ctrl+Shift+D</translation>
        </message>
        <message>
            <source>Ask this of every row of a file…</source>
            <translation>ファイルの各行にこれを質問…</translation>
        </message>
    </context>
    <context>
        <name>MissRatioPlot</name>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>no room</source>
            <translation>空きなし</translation>
        </message>
        <message>
            <source>Miss-ratio curve</source>
            <translation>ミス率曲線</translation>
        </message>
        <message>
            <source>Drag the handle to resize the cache. Hatched: more than the free memory.</source>
            <translation>つまみをドラッグするとキャッシュのサイズが変わります。斜線部: 空きメモリを超える範囲。</translation>
        </message>
        <message>
            <source>{0} experts</source>
            <translation>{0}エキスパート</translation>
        </message>
        <message>
            <source>hits about {0}%</source>
            <translation>ヒット約{0}%</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} トークン/秒</translation>
        </message>
        <message>
            <source>Left and right move the handle, Enter resizes the cache, Escape resets the handle.</source>
            <translation>左右でつまみを移動、Enterでサイズ変更、Escでつまみを元に戻します。</translation>
        </message>
        <message>
            <source>experts kept, of {0}</source>
            <translation>保持するエキスパート（全{0}）</translation>
        </message>
        <message>
            <source>hits, expected</source>
            <translation>ヒット（見込み）</translation>
        </message>
        <message>
            <source>LRU</source>
            <translation>LRU</translation>
        </message>
        <message>
            <source>tokens/s, predicted</source>
            <translation>トークン/秒（予測）</translation>
        </message>
        <message>
            <source>too few tokens for a curve</source>
            <translation>曲線を描くにはトークンが足りません</translation>
        </message>
        <message>
            <source>now</source>
            <translation>現在</translation>
        </message>
    </context>
    <context>
        <name>ModelCard</name>
        <message>
            <source>Tune…</source>
            <translation>チューニング…</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>速度</translation>
        </message>
        <message>
            <source>Times this machine and keeps the fastest settings.</source>
            <translation>このマシンを計測し、最も速い設定を保存します。</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>スターターモデル</translation>
        </message>
    </context>
    <context>
        <name>ModelDialog</name>
        <message>
            <source>Models (*.gguf *.safetensors config.json)</source>
            <translation>モデル (*.gguf *.safetensors config.json)</translation>
        </message>
        <message>
            <source>Open a model file</source>
            <translation>モデルファイルを開く</translation>
        </message>
    </context>
    <context>
        <name>ModelPicker</name>
        <message>
            <source>Models</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Find a model</source>
            <translation>モデルを検索</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>モデルを読み込んでいます</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>読み込みをキャンセル</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>既定に設定</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>モデルファイルを開く…</translation>
        </message>
        <message>
            <source>Get more models…</source>
            <translation>モデルをさらに入手…</translation>
        </message>
        <message>
            <source>Up, Down, Enter</source>
            <translation>↑、↓、Enter</translation>
        </message>
        <message>
            <source>Choose a model in the list, and load it</source>
            <translation>一覧からモデルを選んで読み込む</translation>
        </message>
        <message>
            <source>Remote servers</source>
            <translation>リモートサーバー</translation>
        </message>
        <message>
            <source>No model is on this PC yet.</source>
            <translation>このPCにはまだモデルがありません。</translation>
        </message>
        <message>
            <source>Looking for models…</source>
            <translation>モデルを探しています…</translation>
        </message>
        <message>
            <source>No model has that name.</source>
            <translation>その名前のモデルはありません。</translation>
        </message>
        <message>
            <source>Use in this chat</source>
            <translation>このチャットで使う</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>アンロード</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>読み込む</translation>
        </message>
        <message>
            <source>Frees the memory that the model takes</source>
            <translation>モデルが使っているメモリを解放します</translation>
        </message>
        <message>
            <source>Use in new chats</source>
            <translation>新しいチャットで使う</translation>
        </message>
        <message>
            <source>New chats begin with it; chats that are there stay as they are</source>
            <translation>新しいチャットはこのモデルで始まります。既存のチャットは変わりません</translation>
        </message>
        <message>
            <source>Loaded whenever Switchyard starts</source>
            <translation>Switchyardの起動時に毎回読み込まれます</translation>
        </message>
    </context>
    <context>
        <name>ModelTable</name>
        <message>
            <source>Load the model</source>
            <translation>モデルを読み込む</translation>
        </message>
        <message>
            <source>Remove the model</source>
            <translation>モデルを削除</translation>
        </message>
    </context>
    <context>
        <name>Models</name>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Hub cache</source>
            <translation>Hubのキャッシュ</translation>
        </message>
        <message>
            <source>Your folder</source>
            <translation>あなたのフォルダー</translation>
        </message>
        <message>
            <source>also in {0}</source>
            <translation>{0}にもあり</translation>
        </message>
        <message>
            <source>damaged</source>
            <translation>破損</translation>
        </message>
        <message>
            <source>{0} tokens/s measured</source>
            <translation>実測 {0} トークン/秒</translation>
        </message>
        <message>
            <source>about {0} tokens/s predicted</source>
            <translation>予測 約{0} トークン/秒</translation>
        </message>
        <message>
            <source>never</source>
            <translation>なし</translation>
        </message>
        <message>
            <source>today</source>
            <translation>今日</translation>
        </message>
        <message>
            <source>yesterday</source>
            <translation>昨日</translation>
        </message>
        <message numerus="yes">
            <source>{0} days ago</source>
            <translation>
                <numerusform>{0}日前</numerusform>
            </translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>読み込み済み</translation>
        </message>
        <message>
            <source>default</source>
            <translation>既定</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>画像</translation>
        </message>
        <message>
            <source>tools</source>
            <translation>ツール</translation>
        </message>
        <message>
            <source>thinks</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>embeddings</source>
            <translation>埋め込み</translation>
        </message>
        <message>
            <source>Sees pictures</source>
            <translation>画像を認識</translation>
        </message>
        <message>
            <source>Calls tools</source>
            <translation>ツールを呼び出す</translation>
        </message>
        <message>
            <source>Thinks first</source>
            <translation>先に思考</translation>
        </message>
        <message>
            <source>Embeds texts</source>
            <translation>テキストを埋め込む</translation>
        </message>
        <message>
            <source>last used: {0}</source>
            <translation>最終使用: {0}</translation>
        </message>
        <message>
            <source>{0} B parameters</source>
            <translation>{0} Bパラメーター</translation>
        </message>
        <message>
            <source>{0} experts, {1} per token</source>
            <translation>エキスパート{0}、トークンあたり{1}</translation>
        </message>
        <message>
            <source>context {0}</source>
            <translation>コンテキスト {0}</translation>
        </message>
        <message>
            <source>used {0}</source>
            <translation>使用: {0}</translation>
        </message>
        <message>
            <source>converted weights {0}</source>
            <translation>変換済みの重み {0}</translation>
        </message>
        <message>
            <source>Verifying {0}</source>
            <translation>{0}を検証しています</translation>
        </message>
        <message>
            <source>Moving {0}</source>
            <translation>{0}を移動しています</translation>
        </message>
        <message>
            <source>Copying {0}</source>
            <translation>{0}をコピーしています</translation>
        </message>
        <message>
            <source>Importing {0}</source>
            <translation>{0}をインポートしています</translation>
        </message>
        <message>
            <source>Removing {0}</source>
            <translation>{0}を削除しています</translation>
        </message>
        <message>
            <source>Deleting the converted weights of {0}</source>
            <translation>{0}の変換済みの重みを削除しています</translation>
        </message>
        <message>
            <source>{0} was imported.</source>
            <translation>{0}をインポートしました。</translation>
        </message>
        <message>
            <source>{0} is now in {1}.</source>
            <translation>{0}は{1}に移動しました。</translation>
        </message>
        <message>
            <source>{0} was copied to {1}.</source>
            <translation>{0}を{1}にコピーしました。</translation>
        </message>
        <message>
            <source>{0} is in the trash ({1}).</source>
            <translation>{0}をゴミ箱に移動しました（{1}）。</translation>
        </message>
        <message>
            <source>Everything else in {0} stays there.</source>
            <translation>{0}にあるほかのものはそのまま残ります。</translation>
        </message>
        <message>
            <source>{0} were freed; loading {1} converts its weights again.</source>
            <translation>{0}を解放しました。次に{1}を読み込むと重みを再び変換します。</translation>
        </message>
        <message>
            <source>{0} is damaged, download it again: {1}</source>
            <translation>{0}は壊れています。もう一度ダウンロードしてください: {1}</translation>
        </message>
        <message>
            <source>{0} is intact: every file has its checksum.</source>
            <translation>{0}は正常です。すべてのファイルのチェックサムが一致しました。</translation>
        </message>
        <message>
            <source>{0} is complete; there are no checksums to compare with.</source>
            <translation>{0}は揃っています。比較できるチェックサムはありません。</translation>
        </message>
        <message>
            <source>Code</source>
            <translation>コード</translation>
        </message>
        <message>
            <source>Tools</source>
            <translation>ツール</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>画像</translation>
        </message>
        <message>
            <source>Embeddings</source>
            <translation>埋め込み</translation>
        </message>
        <message>
            <source>Long documents</source>
            <translation>長い文書</translation>
        </message>
        <message>
            <source>Many languages</source>
            <translation>多言語</translation>
        </message>
        <message>
            <source>{0} B parameters, {1} B for each token</source>
            <translation>{0} Bパラメーター、トークンあたり{1} B</translation>
        </message>
        <message>
            <source>{0} B</source>
            <translation>{0} B</translation>
        </message>
        <message>
            <source>gated</source>
            <translation>要承認</translation>
        </message>
        <message>
            <source>{0} downloads</source>
            <translation>ダウンロード{0}回</translation>
        </message>
        <message>
            <source>{0} M</source>
            <translation>{0} M</translation>
        </message>
        <message>
            <source>{0} k</source>
            <translation>{0} k</translation>
        </message>
    </context>
    <context>
        <name>ModelsPage</name>
        <message>
            <source>Models</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Folders…</source>
            <translation>フォルダー…</translation>
        </message>
        <message>
            <source>Import…</source>
            <translation>インポート…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>It frees {0} once the trash is emptied. Its converted weights are deleted.</source>
            <translation>ゴミ箱を空にすると{0}が解放されます。変換済みの重みは削除されます。</translation>
        </message>
        <message>
            <source>This is the copy in {0}. The one in {1} stays, and is listed instead.</source>
            <translation>これは{0}にあるコピーです。{1}のものは残り、代わりに一覧に表示されます。</translation>
        </message>
        <message>
            <source>Move {0} to the trash?</source>
            <translation>{0}をゴミ箱に移動しますか?</translation>
        </message>
        <message>
            <source>Move to the trash</source>
            <translation>ゴミ箱に移動</translation>
        </message>
        <message>
            <source>Load {0} anyway?</source>
            <translation>{0}をそれでも読み込みますか?</translation>
        </message>
        <message>
            <source>Download {0} and load it</source>
            <translation>{0}をダウンロードして読み込む</translation>
        </message>
        <message>
            <source>{0} is being downloaded; it goes on when you leave this page.</source>
            <translation>{0}をダウンロードしています。このページを離れても続きます。</translation>
        </message>
        <message>
            <source>{0} is on this PC now.</source>
            <translation>{0}がこのPCで使えるようになりました。</translation>
        </message>
        <message>
            <source>Load it</source>
            <translation>読み込む</translation>
        </message>
        <message>
            <source>Folder to move it to</source>
            <translation>移動先のフォルダー</translation>
        </message>
        <message>
            <source>Folder for the copy</source>
            <translation>コピー先のフォルダー</translation>
        </message>
        <message>
            <source>Search the hub</source>
            <translation>Hubを検索</translation>
        </message>
        <message>
            <source>Import a model</source>
            <translation>モデルをインポート</translation>
        </message>
    </context>
    <context>
        <name>MonitorPage</name>
        <message>
            <source>Monitor</source>
            <translation>モニター</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Back to live</source>
            <translation>ライブに戻る</translation>
        </message>
        <message>
            <source>Hide lanes and figures</source>
            <translation>レーンと数値を隠す</translation>
        </message>
        <message>
            <source>Show lanes, caches and memory in detail</source>
            <translation>レーン、キャッシュ、メモリーの詳細を表示</translation>
        </message>
        <message>
            <source>A recorded session: {0}.</source>
            <translation>記録されたセッション: {0}。</translation>
        </message>
        <message>
            <source>It ends early; everything intact is shown.</source>
            <translation>途中で終わっています。無事な部分をすべて表示しています。</translation>
        </message>
        <message>
            <source>Compared with</source>
            <translation>比較対象</translation>
        </message>
    </context>
    <context>
        <name>NewJob</name>
        <message>
            <source>No model is loaded.</source>
            <translation>モデルが読み込まれていません。</translation>
        </message>
        <message>
            <source>The job starts when a model is loaded.</source>
            <translation>モデルが読み込まれるとジョブが始まります。</translation>
        </message>
        <message>
            <source>A trial of the first rows says how long a row takes there, and what it costs.</source>
            <translation>最初の数行を試すと、そこでの1行あたりの時間と費用がわかります。</translation>
        </message>
        <message>
            <source>Each node plans for itself; how fast it is shows when rows are answered.</source>
            <translation>各ノードが独自に計画します。速度は行に回答し始めるとわかります。</translation>
        </message>
    </context>
    <context>
        <name>NumbersCard</name>
        <message>
            <source>Measurements</source>
            <translation>測定値</translation>
        </message>
        <message>
            <source>Not measured yet. Numbers with “about” are assumed, from data sheets of similar hardware; measuring takes ten seconds.</source>
            <translation>未測定です。「約」の付いた値は、似たハードウェアの仕様書からの仮定です。測定は10秒で終わります。</translation>
        </message>
        <message>
            <source>quick</source>
            <translation>クイック</translation>
        </message>
        <message>
            <source>thorough</source>
            <translation>詳細</translation>
        </message>
        <message>
            <source>Measured on {0}, {1}. The best of each kind:</source>
            <translation>{0}に測定、{1}。種類ごとの最良値:</translation>
        </message>
        <message>
            <source>Skipped: {0} ({1}).</source>
            <translation>省略: {0}（{1}）。</translation>
        </message>
        <message>
            <source>{0} varied by {1}% in every repeat.</source>
            <translation>{0}は繰り返すたびに{1}%変動しました。</translation>
        </message>
        <message>
            <source>Each is measured several times; the best of each kind so far:</source>
            <translation>それぞれ複数回測定します。これまでの種類ごとの最良値:</translation>
        </message>
        <message>
            <source>Numbers appear here as they are measured.</source>
            <translation>測定した値がここに表示されます。</translation>
        </message>
    </context>
    <context>
        <name>OfferView</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ カタログ上のサイズです。Hubでは未確認です。</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>All files…</source>
            <translation>すべてのファイル…</translation>
        </message>
        <message>
            <source>All files of {0}</source>
            <translation>{0}のすべてのファイル</translation>
        </message>
    </context>
    <context>
        <name>OnThisPcCard</name>
        <message>
            <source>On this PC</source>
            <translation>このPC</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>From</source>
            <translation>入手元</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>サイズ</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>精度</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>トークン/秒</translation>
        </message>
        <message>
            <source>Used</source>
            <translation>使用</translation>
        </message>
        <message>
            <source>What a model can do</source>
            <translation>モデルの機能</translation>
        </message>
        <message>
            <source>Any ability</source>
            <translation>すべての機能</translation>
        </message>
        <message>
            <source>Models on this PC</source>
            <translation>このPCのモデル</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>読み込む</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>アンロード</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>既定に設定</translation>
        </message>
        <message>
            <source>More</source>
            <translation>その他</translation>
        </message>
        <message>
            <source>Verify files</source>
            <translation>ファイルを検証</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>フォルダーで表示</translation>
        </message>
        <message>
            <source>Move to another folder…</source>
            <translation>別のフォルダーに移動…</translation>
        </message>
        <message>
            <source>Export a copy…</source>
            <translation>コピーをエクスポート…</translation>
        </message>
        <message>
            <source>Remove…</source>
            <translation>削除…</translation>
        </message>
        <message>
            <source>No model is here yet: take one that suits this PC.</source>
            <translation>まだモデルがありません。このPCに合うものを選んでください。</translation>
        </message>
        <message>
            <source>No model here can do that.</source>
            <translation>この機能を持つモデルはありません。</translation>
        </message>
        <message>
            <source>1 model</source>
            <translation>1モデル</translation>
        </message>
        <message numerus="yes">
            <source>{0} models</source>
            <translation>
                <numerusform>{0}モデル</numerusform>
            </translation>
        </message>
        <message>
            <source>Default</source>
            <translation>既定</translation>
        </message>
        <message>
            <source>Delete converted weights ({0})</source>
            <translation>変換済みの重みを削除（{0}）</translation>
        </message>
        <message>
            <source>Unload it first.</source>
            <translation>先にアンロードしてください。</translation>
        </message>
        <message>
            <source>It is used where it lies: remove it there.</source>
            <translation>置かれた場所のまま使われています。削除はその場所で行ってください。</translation>
        </message>
    </context>
    <context>
        <name>OtherProgramsCard</name>
        <message>
            <source>How programs reach it</source>
            <translation>プログラムからの接続先</translation>
        </message>
        <message>
            <source>Copy address</source>
            <translation>アドレスをコピー</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>アドレス</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>表示</translation>
        </message>
        <message>
            <source>Show the key</source>
            <translation>キーを表示</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>コピー</translation>
        </message>
        <message>
            <source>Copy the key</source>
            <translation>キーをコピー</translation>
        </message>
        <message>
            <source>New key</source>
            <translation>新しいキー</translation>
        </message>
        <message>
            <source>Free</source>
            <translation>解放</translation>
        </message>
        <message>
            <source>Models asked for by name</source>
            <translation>名前で要求されたモデル</translation>
        </message>
        <message>
            <source>Copy example</source>
            <translation>例をコピー</translation>
        </message>
        <message>
            <source>OpenAI's interface is at /v1; programs for Anthropic or Ollama take the address alone.</source>
            <translation>OpenAIのインターフェイスは/v1です。AnthropicやOllama用のプログラムにはアドレスだけを指定します。</translation>
        </message>
        <message>
            <source>Example</source>
            <translation>例</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>リクエスト</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>キー</translation>
        </message>
        <message>
            <source>Off. Nothing listens, and no editor, agent or other app can ask.</source>
            <translation>オフです。待ち受けはなく、エディター、エージェント、その他のアプリは利用できません。</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>起動しています…</translation>
        </message>
        <message>
            <source>On, for all models on this PC. Chats in this window come first.</source>
            <translation>オン。このPCのすべてのモデルが対象です。このウィンドウのチャットが優先されます。</translation>
        </message>
        <message>
            <source>Off, because of a problem.</source>
            <translation>問題が発生したためオフです。</translation>
        </message>
        <message>
            <source>No other PC can reach it. Any program here can.</source>
            <translation>ほかのPCからは接続できません。このPCのどのプログラムからも使えます。</translation>
        </message>
        <message>
            <source>No other PC can reach it. Programs here need the key.</source>
            <translation>ほかのPCからは接続できません。このPCのプログラムにはキーが必要です。</translation>
        </message>
        <message>
            <source>What is asked and answered crosses your network unencrypted: use it only at home.</source>
            <translation>質問と回答は暗号化されずにネットワークを通ります。自宅でのみお使いください。</translation>
        </message>
        <message>
            <source>{0} is being loaded.</source>
            <translation>{0}を読み込んでいます。</translation>
        </message>
        <message>
            <source>{0} is loaded.</source>
            <translation>{0}は読み込み済みです。</translation>
        </message>
        <message>
            <source>Any model on this PC: it is loaded beside yours, one at a time.</source>
            <translation>このPCのどのモデルでも、あなたのモデルと並べて一度に1つ読み込みます。</translation>
        </message>
        <message>
            <source>In the system's keyring.</source>
            <translation>システムのキーリングにあります。</translation>
        </message>
        <message>
            <source>For this run only: this system has no keyring.</source>
            <translation>今回の実行中のみ有効です。このシステムにはキーリングがありません。</translation>
        </message>
        <message>
            <source>Since the window opened; what was asked and answered is not kept.</source>
            <translation>ウィンドウを開いてからの記録です。質問と回答の内容は保存されません。</translation>
        </message>
        <message>
            <source>None yet.</source>
            <translation>まだありません。</translation>
        </message>
    </context>
    <context>
        <name>OutputCard</name>
        <message>
            <source>Result file</source>
            <translation>結果ファイル</translation>
        </message>
        <message>
            <source>Name of the result file</source>
            <translation>結果ファイルの名前</translation>
        </message>
        <message>
            <source>File type</source>
            <translation>ファイルの種類</translation>
        </message>
        <message>
            <source>Another folder…</source>
            <translation>別のフォルダー…</translation>
        </message>
        <message>
            <source>In</source>
            <translation>保存先</translation>
        </message>
        <message>
            <source>In OpenAI's output format; rows that fail go into an error file beside it.</source>
            <translation>OpenAIの出力形式です。失敗した行は横のエラーファイルに入ります。</translation>
        </message>
        <message>
            <source>Keeps the input's columns; adds the answer, how it ended, token counts and, for failed rows, why.</source>
            <translation>入力の列を残し、回答、終わり方、トークン数、失敗した行の理由を加えます。</translation>
        </message>
        <message>
            <source>Name the result file.</source>
            <translation>結果ファイルに名前を付けてください。</translation>
        </message>
        <message>
            <source>The result file's name contains a slash: choose the folder beside it instead.</source>
            <translation>結果ファイルの名前にスラッシュが含まれています。横のフォルダーで保存先を選んでください。</translation>
        </message>
        <message>
            <source>Folder of the result file</source>
            <translation>結果ファイルのフォルダー</translation>
        </message>
    </context>
    <context>
        <name>Pages</name>
        <message>
            <source>Chat</source>
            <translation>チャット</translation>
        </message>
        <message>
            <source>Batch</source>
            <translation>バッチ</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>モニター</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>チューニング</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>設定</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>最初のモデルを選択</translation>
        </message>
    </context>
    <context>
        <name>PassageDialog</name>
        <message>
            <source>Source {0}</source>
            <translation>出典 {0}</translation>
        </message>
        <message>
            <source>Document</source>
            <translation>文書</translation>
        </message>
        <message>
            <source>The passage and what stands around it</source>
            <translation>該当箇所とその前後</translation>
        </message>
        <message>
            <source>Looking for the passage…</source>
            <translation>該当箇所を探しています…</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>This passage is no longer there: the document has changed or was removed since.</source>
            <translation>この箇所はもうありません。文書がその後変更または削除されました。</translation>
        </message>
    </context>
    <context>
        <name>PictureRow</name>
        <message>
            <source>Remove picture {0}</source>
            <translation>画像{0}を削除</translation>
        </message>
        <message>
            <source>damaged picture</source>
            <translation>壊れた画像</translation>
        </message>
        <message>
            <source>Picture {0} of {1}</source>
            <translation>画像 {0}/{1}</translation>
        </message>
        <message>
            <source>{0}, {1} by {2} pixels</source>
            <translation>{0}、{1} × {2} ピクセル</translation>
        </message>
    </context>
    <context>
        <name>Pictures</name>
        <message>
            <source>A message takes up to {0} pictures.</source>
            <translation>1つのメッセージに添付できる画像は{0}枚までです。</translation>
        </message>
        <message>
            <source>A chat takes {0} of pictures: start a new chat for more.</source>
            <translation>1つのチャットの画像は{0}までです。追加するには新しいチャットを始めてください。</translation>
        </message>
        <message>
            <source>{0} is not a file.</source>
            <translation>{0}はファイルではありません。</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}).</source>
            <translation>{0}を読めません（{1}）。</translation>
        </message>
        <message>
            <source>{0} is larger than {1}: make it smaller first.</source>
            <translation>{0}は{1}を超えています。先に小さくしてください。</translation>
        </message>
        <message>
            <source>{0} is damaged and cannot be shown.</source>
            <translation>{0}は壊れていて表示できません。</translation>
        </message>
        <message>
            <source>{0} is in the {1} format, which is not read here: save it as PNG or JPEG.</source>
            <translation>{0} は {1} 形式で、ここでは読み取れません。PNG または JPEG で保存してください。</translation>
        </message>
        <message>
            <source>{0} is not a PNG, JPEG, WebP or GIF picture.</source>
            <translation>{0}はPNG、JPEG、WebP、GIFの画像ではありません。</translation>
        </message>
        <message>
            <source>{0} has too many pixels: make it smaller first.</source>
            <translation>{0}はピクセル数が多すぎます。先に小さくしてください。</translation>
        </message>
    </context>
    <context>
        <name>PlaceRows</name>
        <message>
            <source>Who answers the rows</source>
            <translation>行に回答するもの</translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1行</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0}行</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>PlacesCard</name>
        <message>
            <source>Answered by</source>
            <translation>回答するもの</translation>
        </message>
        <message>
            <source>Ask two for slow last rows</source>
            <translation>最後の遅い行は2か所に問い合わせる</translation>
        </message>
        <message>
            <source>Near the end, a row that one server is slow with is asked of another as well, which costs tokens.</source>
            <translation>終盤で、あるサーバーが時間のかかる行を別のサーバーにも問い合わせます。その分トークンを使います。</translation>
        </message>
        <message>
            <source>Add a column that says who answered</source>
            <translation>誰が回答したかの列を追加</translation>
        </message>
        <message>
            <source>A Ray cluster at</source>
            <translation>Rayクラスター:</translation>
        </message>
        <message>
            <source>Each of its nodes answers rows with the model that is loaded here.</source>
            <translation>各ノードが、ここで読み込まれているモデルで行に回答します。</translation>
        </message>
        <message>
            <source>Address of the Ray cluster</source>
            <translation>Rayクラスターのアドレス</translation>
        </message>
        <message>
            <source>auto, or 10.0.0.5:6379</source>
            <translation>auto または 10.0.0.5:6379</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>このPC</translation>
        </message>
        <message>
            <source>Give the address of the Ray cluster, or auto for the one of this PC.</source>
            <translation>Rayクラスターのアドレスを入力してください。このPCのものはautoです。</translation>
        </message>
        <message>
            <source>Choose who answers the rows.</source>
            <translation>行に回答するものを選んでください。</translation>
        </message>
    </context>
    <context>
        <name>PlanBars</name>
        <message>
            <source>experts, {0} slots</source>
            <translation>エキスパート、{0}スロット</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>エキスパート</translation>
        </message>
        <message>
            <source>model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>loading buffers</source>
            <translation>読み込みバッファー</translation>
        </message>
        <message>
            <source>chat memory</source>
            <translation>チャットメモリ</translation>
        </message>
        <message>
            <source>working memory</source>
            <translation>作業メモリ</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>画像の読み取り</translation>
        </message>
        <message>
            <source>safety margin</source>
            <translation>安全マージン</translation>
        </message>
        <message>
            <source>other programs</source>
            <translation>ほかのプログラム</translation>
        </message>
        <message>
            <source>Memory by tier</source>
            <translation>階層別のメモリ</translation>
        </message>
        <message>
            <source>under {0}</source>
            <translation>{0}未満</translation>
        </message>
        <message>
            <source>free</source>
            <translation>空き</translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} GB</translation>
        </message>
        <message>
            <source>{0} of {1} GB</source>
            <translation>{0} / {1} GB</translation>
        </message>
    </context>
    <context>
        <name>PlanCard</name>
        <message>
            <source>Plan</source>
            <translation>プラン</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>計画しています…</translation>
        </message>
        <message>
            <source>{0} {1}: {2}</source>
            <translation>{0} {1}: {2}</translation>
        </message>
        <message>
            <source>Alternatives, in tokens/s: {0}.</source>
            <translation>ほかの案（トークン/秒）: {0}。</translation>
        </message>
        <message>
            <source>Plan for {0}</source>
            <translation>{0}のプラン</translation>
        </message>
    </context>
    <context>
        <name>PlanTable</name>
        <message>
            <source>Plan</source>
            <translation>プラン</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>予測</translation>
        </message>
        <message>
            <source>Timed</source>
            <translation>計測</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>トークン/秒</translation>
        </message>
        <message>
            <source>predicted {0} tokens/s ({1} to {2})</source>
            <translation>予測 {0} トークン/秒（{1}～{2}）</translation>
        </message>
        <message>
            <source>timed {0} tokens/s</source>
            <translation>計測 {0} トークン/秒</translation>
        </message>
        <message>
            <source>{2} runs from {0} to {1}</source>
            <translation>{2}回、{0}～{1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>最初のトークンまで{0}秒</translation>
        </message>
        <message>
            <source>winner</source>
            <translation>最速</translation>
        </message>
        <message>
            <source>the plan</source>
            <translation>プラン</translation>
        </message>
        <message>
            <source>as it ran before</source>
            <translation>これまでの設定</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失敗</translation>
        </message>
    </context>
    <context>
        <name>PoliciesCard</name>
        <message>
            <source>Policies</source>
            <translation>方式</translation>
        </message>
        <message>
            <source>Cache policies</source>
            <translation>キャッシュの方式</translation>
        </message>
        <message>
            <source>When the cache is full, a policy decides which expert to evict for the next one. Each is tested on the model's actual requests; its share of hits (experts found in the cache) shows how well it would do.</source>
            <translation>キャッシュが満杯になると、次のためにどのエキスパートを追い出すかを方式が決めます。それぞれをモデルの実際の要求で試し、ヒット（キャッシュにあったエキスパート）の割合で良し悪しを示します。</translation>
        </message>
        <message>
            <source>recent hit rate, each on its own</source>
            <translation>最近のヒット率（各方式単独）</translation>
        </message>
        <message>
            <source>All are simulated on the live routing; the one with the most hits is adopted.</source>
            <translation>実際のルーティングですべてをシミュレートし、ヒットが最も多いものを採用します。</translation>
        </message>
        <message>
            <source>The policy is set in the settings; the others are simulated.</source>
            <translation>方式は設定で固定されています。ほかはシミュレートのみです。</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>{0} in use</source>
            <translation>{0}を使用中</translation>
        </message>
    </context>
    <context>
        <name>PredictButton</name>
        <message>
            <source>Predicted</source>
            <translation>予測</translation>
        </message>
        <message>
            <source>The simulator's prediction for this request, below the recording</source>
            <translation>このリクエストに対するシミュレーターの予測を、記録の下に表示します</translation>
        </message>
        <message>
            <source>Show the predicted timeline</source>
            <translation>予測タイムラインを表示</translation>
        </message>
        <message>
            <source>Nothing to predict yet: ask something in Chat first.</source>
            <translation>まだ予測するものがありません。先にチャットで質問してください。</translation>
        </message>
        <message>
            <source>the model's files could not be read</source>
            <translation>モデルのファイルを読めませんでした</translation>
        </message>
        <message>
            <source>No prediction: {0}</source>
            <translation>予測できません: {0}</translation>
        </message>
    </context>
    <context>
        <name>Predicted</name>
        <message>
            <source>{0} tokens/s predicted</source>
            <translation>予測 {0} トークン/秒</translation>
        </message>
        <message>
            <source>{0} measured</source>
            <translation>実測 {0}</translation>
        </message>
        <message>
            <source>first token after {0}</source>
            <translation>最初のトークンまで{0}</translation>
        </message>
        <message>
            <source>Simulated for {0} tokens read and {1} written, aligned at the same step.</source>
            <translation>読み取り{0}トークン、生成{1}トークンでシミュレート。同じステップで揃えています。</translation>
        </message>
        <message>
            <source>Measured here: {0}.</source>
            <translation>ここで測定: {0}。</translation>
        </message>
        <message>
            <source>From data sheets, not measured by Tune: {0}.</source>
            <translation>仕様書の値（チューニングで未測定）: {0}。</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity, so that {0} slots hit {1}%;</source>
            <translation>仮定: エキスパートの人気は典型的で、{0}スロットのヒットは{1}%。</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity;</source>
            <translation>仮定: エキスパートの人気は典型的。</translation>
        </message>
        <message>
            <source>no other program is running.</source>
            <translation>ほかのプログラムは動いていないものとします。</translation>
        </message>
        <message>
            <source>processor and RAM</source>
            <translation>プロセッサとRAM</translation>
        </message>
        <message>
            <source>graphics card</source>
            <translation>グラフィックスカード</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>ディスク</translation>
        </message>
    </context>
    <context>
        <name>PredictionCard</name>
        <message>
            <source>Prefetching</source>
            <translation>プリフェッチ</translation>
        </message>
        <message>
            <source>Prefetching copies experts before they are needed, guessing which will be. A right guess saves a miss, a wait for memory; a wrong one costs a useless copy.</source>
            <translation>プリフェッチは、必要になりそうなエキスパートを予想して先にコピーします。当たればミス、つまりメモリ待ちを避けられ、外れると無駄なコピーになります。</translation>
        </message>
        <message>
            <source>In use: {0}, one layer ahead.</source>
            <translation>使用中: {0}、1レイヤー先。</translation>
        </message>
        <message numerus="yes">
            <source>In use: {0}, {1} layers ahead.</source>
            <translation>
                <numerusform>使用中: {0}、{1}レイヤー先。</numerusform>
            </translation>
        </message>
        <message>
            <source>None is in use: no predictor would save more than it costs.</source>
            <translation>使用していません。コスト以上に節約できる予測器がありません。</translation>
        </message>
        <message>
            <source>Nothing is predicted on this model and machine: experts are fetched on a miss.</source>
            <translation>このモデルとマシンでは予測を行いません。エキスパートはミス時に取得します。</translation>
        </message>
        <message>
            <source>Predictor</source>
            <translation>予測器</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>予測</translation>
        </message>
        <message>
            <source>right</source>
            <translation>的中</translation>
        </message>
        <message>
            <source>gain</source>
            <translation>効果</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>Share of the missing experts that was predicted</source>
            <translation>不足したエキスパートのうち、予測できた割合</translation>
        </message>
        <message>
            <source>Share of the predicted, missing experts that was needed</source>
            <translation>予測した不足エキスパートのうち、必要だった割合</translation>
        </message>
        <message>
            <source>Milliseconds its use would save per step, net of its cost</source>
            <translation>コストを差し引いて、1ステップあたりに節約できるミリ秒</translation>
        </message>
        <message>
            <source>used</source>
            <translation>使用</translation>
        </message>
        <message>
            <source>wasted</source>
            <translation>無駄</translation>
        </message>
        <message>
            <source>{0}: of {1} prefetched, {2} used, {3} wasted (hatched), the rest waits.</source>
            <translation>{0}: プリフェッチ{1}のうち、使用{2}、無駄{3}（斜線）、残りは待機中。</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
    </context>
    <context>
        <name>ProgressCard</name>
        <message>
            <source>Job progress</source>
            <translation>ジョブの進行状況</translation>
        </message>
    </context>
    <context>
        <name>PromptPopover</name>
        <message>
            <source>Saved prompts</source>
            <translation>保存したプロンプト</translation>
        </message>
        <message>
            <source>Find a prompt</source>
            <translation>プロンプトを検索</translation>
        </message>
        <message>
            <source>/</source>
            <translation>/</translation>
        </message>
        <message>
            <source>Saved prompts, in an empty message</source>
            <translation>保存したプロンプト（空のメッセージで）</translation>
        </message>
        <message>
            <source>Save this message…</source>
            <translation>このメッセージを保存…</translation>
        </message>
        <message>
            <source>New…</source>
            <translation>新規…</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>編集…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>削除</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>元に戻す</translation>
        </message>
        <message>
            <source>No saved prompt has these words.</source>
            <translation>これらの語を含む保存済みプロンプトはありません。</translation>
        </message>
        <message>
            <source>Nothing is saved yet. A saved prompt is a message to use again; where it says {{topic}}, you are asked for the topic each time.</source>
            <translation>まだ何も保存されていません。保存したプロンプトは繰り返し使えるメッセージです。{{topic}}のように書いた箇所は、使うたびに内容を尋ねます。</translation>
        </message>
        <message>
            <source>Insert</source>
            <translation>挿入</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>戻る</translation>
        </message>
        <message>
            <source>Name of the prompt</source>
            <translation>プロンプトの名前</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>名前</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>プロンプト</translation>
        </message>
        <message>
            <source>Summarise {{text}} in {{number}} sentences.</source>
            <translation>{{text}}を{{number}}文で要約してください。</translation>
        </message>
        <message>
            <source>A name between double braces, such as {{topic}}, is asked for each time.</source>
            <translation>{{topic}}のように二重の波かっこで囲んだ名前は、使うたびに尋ねます。</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Another prompt has this name: saving replaces it.</source>
            <translation>同じ名前のプロンプトがあります。保存すると置き換えられます。</translation>
        </message>
    </context>
    <context>
        <name>QuickPrompt</name>
        <message>
            <source>Quick question</source>
            <translation>クイック質問</translation>
        </message>
        <message>
            <source>Ask something</source>
            <translation>質問を入力</translation>
        </message>
        <message>
            <source>Question</source>
            <translation>質問</translation>
        </message>
        <message>
            <source>Enter asks, Shift+Enter starts a new line, Esc closes</source>
            <translation>Enterで質問、Shift+Enterで改行、Escで閉じる</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Open in Switchyard</source>
            <translation>Switchyardで開く</translation>
        </message>
        <message>
            <source>The server that answers new chats is not in the list: choose another model.</source>
            <translation>新しいチャットに回答するサーバーが一覧にありません。別のモデルを選んでください。</translation>
        </message>
        <message>
            <source>This would go to {0}: send a chat there from Switchyard first.</source>
            <translation>これは{0}に送られます。先にSwitchyardからそこへチャットを送ってください。</translation>
        </message>
        <message>
            <source>Waiting for the answer…</source>
            <translation>回答を待っています…</translation>
        </message>
        <message>
            <source>Thinking…</source>
            <translation>思考中…</translation>
        </message>
        <message>
            <source>The engine is not running: open Switchyard to restart it.</source>
            <translation>エンジンが動いていません。Switchyardを開いて再起動してください。</translation>
        </message>
        <message>
            <source>No model is loaded: open Switchyard to choose one.</source>
            <translation>モデルが読み込まれていません。Switchyardを開いて選んでください。</translation>
        </message>
        <message>
            <source>The model is loading; the answer follows.</source>
            <translation>モデルを読み込んでいます。回答は後から届きます。</translation>
        </message>
        <message>
            <source>Waiting for another answer…</source>
            <translation>別の回答を待っています…</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>Ask</source>
            <translation>質問</translation>
        </message>
    </context>
    <context>
        <name>RaceCard</name>
        <message>
            <source>Timed on the real engine</source>
            <translation>実際のエンジンで計測</translation>
        </message>
        <message>
            <source>Nothing timed yet: “Tune” times the best plans and the current settings with real tokens.</source>
            <translation>まだ計測していません。「チューニング」は、有力なプランと現在の設定を実際のトークンで計測します。</translation>
        </message>
        <message>
            <source>Use winner now</source>
            <translation>最速の設定を使う</translation>
        </message>
        <message>
            <source>Keep as before</source>
            <translation>以前のままにする</translation>
        </message>
        <message>
            <source>Bars: measured, which is what counts. Brackets: the predicted range.</source>
            <translation>棒: 計測値（これが基準です）。かっこ: 予測の範囲。</translation>
        </message>
        <message>
            <source>{0}, {1}</source>
            <translation>{0}、{1}</translation>
        </message>
        <message>
            <source>Before {0} → after {1} tokens/s</source>
            <translation>前 {0} → 後 {1} トークン/秒</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} トークン/秒</translation>
        </message>
        <message>
            <source>This model now runs with it: {0}, {1} tokens/s.</source>
            <translation>このモデルは現在これで動いています: {0}、{1} トークン/秒。</translation>
        </message>
        <message>
            <source>This model has since run at {0} tokens/s, much faster than the {1} timed here: the machine was busy then. Plans no longer use these figures. Tune again.</source>
            <translation>このモデルはその後{0} トークン/秒で動き、ここで計測した{1}よりかなり高速です。当時マシンがほかの処理で忙しかったためです。プランではこの値を使いません。もう一度チューニングしてください。</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU while this was timed: every figure is too low, and the wrong plan may have won. Plans do not use these figures. Tune again when those programs have finished.</source>
            <translation>計測中にほかのプログラムがCPUの{0}%を使っていました。すべての値が低すぎ、誤ったプランが選ばれた可能性があります。プランではこの値を使いません。それらのプログラムが終わってから、もう一度チューニングしてください。</translation>
        </message>
    </context>
    <context>
        <name>RaceDelegate</name>
        <message>
            <source>waits</source>
            <translation>待機中</translation>
        </message>
    </context>
    <context>
        <name>RaceView</name>
        <message>
            <source>Plans, predicted and measured</source>
            <translation>プラン（予測と計測）</translation>
        </message>
    </context>
    <context>
        <name>RangeBar</name>
        <message>
            <source>10 s</source>
            <translation>10秒</translation>
        </message>
        <message>
            <source>Show 10 seconds</source>
            <translation>10秒間を表示</translation>
        </message>
        <message>
            <source>60 s</source>
            <translation>60秒</translation>
        </message>
        <message>
            <source>Show 60 seconds</source>
            <translation>60秒間を表示</translation>
        </message>
        <message>
            <source>5 min</source>
            <translation>5分</translation>
        </message>
        <message>
            <source>Show 5 minutes</source>
            <translation>5分間を表示</translation>
        </message>
        <message>
            <source>Session</source>
            <translation>セッション</translation>
        </message>
        <message>
            <source>Show the whole session</source>
            <translation>セッション全体を表示</translation>
        </message>
        <message>
            <source>Freeze</source>
            <translation>固定</translation>
        </message>
        <message>
            <source>Frozen</source>
            <translation>固定中</translation>
        </message>
        <message>
            <source>Space freezes</source>
            <translation>スペースで固定</translation>
        </message>
        <message>
            <source>Frozen: Home follows</source>
            <translation>固定中: Homeで追従</translation>
        </message>
        <message>
            <source>Space freezes the view; recording continues</source>
            <translation>スペースで表示を固定します。記録は続きます</translation>
        </message>
        <message>
            <source>Home follows live data</source>
            <translation>Homeでライブデータに追従</translation>
        </message>
        <message>
            <source>Freeze the view; recording continues</source>
            <translation>表示を固定。記録は続きます</translation>
        </message>
        <message>
            <source>Follow live data</source>
            <translation>ライブデータに追従</translation>
        </message>
    </context>
    <context>
        <name>RecommendationList</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ カタログ上のサイズです。Hubでは未確認です。</translation>
        </message>
    </context>
    <context>
        <name>RecommendationRow</name>
        <message>
            <source>Download</source>
            <translation>ダウンロード</translation>
        </message>
    </context>
    <context>
        <name>Recommendations</name>
        <message>
            <source>Fast</source>
            <translation>高速</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>バランス</translation>
        </message>
        <message>
            <source>Best that fits</source>
            <translation>収まる中で最良</translation>
        </message>
        <message>
            <source>on this PC</source>
            <translation>このPC上</translation>
        </message>
        <message>
            <source>first answer in about {0}</source>
            <translation>最初の回答まで約{0}</translation>
        </message>
        <message>
            <source>first answer in about {0} at 100 Mbit/s</source>
            <translation>100 Mbit/sで最初の回答まで約{0}</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>Downloading</source>
            <translation>ダウンロード中</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>読み込む</translation>
        </message>
    </context>
    <context>
        <name>Report</name>
        <message>
            <source>Save a report</source>
            <translation>レポートを保存</translation>
        </message>
        <message>
            <source>Text (*.txt)</source>
            <translation>テキスト (*.txt)</translation>
        </message>
    </context>
    <context>
        <name>Resizing</name>
        <message>
            <source>Requested {0} experts…</source>
            <translation>{0}エキスパートを要求しました…</translation>
        </message>
        <message>
            <source>Stays at {0} experts: no room for {1}.</source>
            <translation>{0}エキスパートのままです。{1}を入れる空きがありません。</translation>
        </message>
        <message>
            <source>Stays at {0} experts: {1} is not a valid size, or too few for a step.</source>
            <translation>{0}エキスパートのままです。{1}は有効なサイズではないか、1ステップに足りません。</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}; no room for {2}.</source>
            <translation>{1}から{0}エキスパートになりました。{2}を入れる空きがありません。</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}.</source>
            <translation>{1}から{0}エキスパートになりました。</translation>
        </message>
        <message>
            <source>hits {0}%, was {1}%</source>
            <translation>ヒット{0}%（以前は{1}%）</translation>
        </message>
        <message>
            <source>{0} tokens/s, was {1}</source>
            <translation>{0} トークン/秒（以前は{1}）</translation>
        </message>
        <message>
            <source>(predicted: {0})</source>
            <translation>（予測: {0}）</translation>
        </message>
        <message>
            <source>Measured: {0}.</source>
            <translation>実測: {0}。</translation>
        </message>
    </context>
    <context>
        <name>RooflinePlot</name>
        <message>
            <source>operations per byte →</source>
            <translation>バイトあたりの演算数 →</translation>
        </message>
        <message>
            <source>Roofline</source>
            <translation>ルーフライン</translation>
        </message>
        <message>
            <source>{0}: {1}, up to {2}</source>
            <translation>{0}: {1}、最大{2}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>GPU over the link</source>
            <translation>接続経由のGPU</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>limited by the link to the card</source>
            <translation>カードとの接続が上限</translation>
        </message>
        <message>
            <source>limited by the card's memory</source>
            <translation>カードのメモリが上限</translation>
        </message>
        <message>
            <source>limited by GPU compute</source>
            <translation>GPUの演算が上限</translation>
        </message>
        <message>
            <source>limited by RAM</source>
            <translation>RAMが上限</translation>
        </message>
        <message>
            <source>limited by CPU compute</source>
            <translation>CPUの演算が上限</translation>
        </message>
        <message>
            <source>{0}: {1} operations per byte, {2}, {3}</source>
            <translation>{0}: バイトあたり{1}演算、{2}、{3}</translation>
        </message>
        <message>
            <source>decode</source>
            <translation>デコード</translation>
        </message>
        <message>
            <source>prefill</source>
            <translation>プリフィル</translation>
        </message>
        <message>
            <source>batch</source>
            <translation>バッチ</translation>
        </message>
    </context>
    <context>
        <name>RowDetail</name>
        <message>
            <source>Prompt</source>
            <translation>プロンプト</translation>
        </message>
        <message>
            <source>Reasoning</source>
            <translation>推論過程</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>コピー</translation>
        </message>
        <message>
            <source>Copy the answer</source>
            <translation>回答をコピー</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Row {0}</source>
            <translation>行 {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} トークン</translation>
        </message>
        <message>
            <source>Failed: the row {0}.</source>
            <translation>失敗。この行: {0}。</translation>
        </message>
        <message>
            <source>The input can no longer be read, or the row was not sent.</source>
            <translation>入力を読めなくなったか、行が送信されていません。</translation>
        </message>
    </context>
    <context>
        <name>RowsCard</name>
        <message>
            <source>Finished rows</source>
            <translation>完了した行</translation>
        </message>
        <message>
            <source>Row</source>
            <translation>行</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>プロンプト</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>End</source>
            <translation>終了</translation>
        </message>
        <message>
            <source>Tokens</source>
            <translation>トークン</translation>
        </message>
        <message>
            <source>Answer again with more tokens</source>
            <translation>トークンを増やして再回答</translation>
        </message>
        <message>
            <source>Twice as many as each of them had</source>
            <translation>それぞれの上限を2倍にします</translation>
        </message>
        <message>
            <source>Latest</source>
            <translation>最新</translation>
        </message>
        <message>
            <source>All</source>
            <translation>すべて</translation>
        </message>
        <message>
            <source>Failed</source>
            <translation>失敗</translation>
        </message>
        <message>
            <source>Cut off</source>
            <translation>途切れ</translation>
        </message>
        <message>
            <source>No row has failed.</source>
            <translation>失敗した行はありません。</translation>
        </message>
        <message>
            <source>No row was cut off at its limit of tokens.</source>
            <translation>トークンの上限で途切れた行はありません。</translation>
        </message>
        <message>
            <source>Rows appear here as they are answered.</source>
            <translation>回答した行がここに表示されます。</translation>
        </message>
        <message>
            <source>No row has been answered yet.</source>
            <translation>まだ回答した行はありません。</translation>
        </message>
    </context>
    <context>
        <name>RunCard</name>
        <message>
            <source>Tuning</source>
            <translation>チューニング</translation>
        </message>
        <message>
            <source>A model, by a few letters of its name</source>
            <translation>モデル名の数文字を入力</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>A model on this PC, one of the catalogue, or a hub id such as Qwen/Qwen3-30B-A3B</source>
            <translation>このPCのモデル、カタログのモデル、またはQwen/Qwen3-30B-A3BのようなHubのID</translation>
        </message>
        <message>
            <source>Quick, 10 s</source>
            <translation>クイック、10秒</translation>
        </message>
        <message>
            <source>Quick: measures for about ten seconds</source>
            <translation>クイック: 約10秒間測定します</translation>
        </message>
        <message>
            <source>Thorough, 2 min</source>
            <translation>詳細、2分</translation>
        </message>
        <message>
            <source>Thorough: measures for about two minutes</source>
            <translation>詳細: 約2分間測定します</translation>
        </message>
        <message>
            <source>Measure only</source>
            <translation>測定のみ</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>チューニング</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Progress</source>
            <translation>進行状況</translation>
        </message>
        <message>
            <source>Save anyway</source>
            <translation>それでも保存</translation>
        </message>
        <message>
            <source>Saves figures that are too low because other programs were busy</source>
            <translation>ほかのプログラムの影響で低すぎる値を保存します</translation>
        </message>
        <message>
            <source>Cancelling</source>
            <translation>キャンセルしています</translation>
        </message>
        <message>
            <source>Cancelling. The previous model is loaded again.</source>
            <translation>キャンセルしています。前のモデルを再び読み込みます。</translation>
        </message>
        <message>
            <source>Tune again</source>
            <translation>もう一度チューニング</translation>
        </message>
        <message>
            <source>Only models on this PC can be timed; of this one you see a plan.</source>
            <translation>計測できるのはこのPCのモデルだけです。このモデルはプランのみ表示します。</translation>
        </message>
        <message>
            <source>Get it on the Models page…</source>
            <translation>「モデル」ページで入手…</translation>
        </message>
        <message>
            <source>Get another model…</source>
            <translation>別のモデルを入手…</translation>
        </message>
    </context>
    <context>
        <name>RunFollowing</name>
        <message>
            <source>Waiting for the answer</source>
            <translation>回答を待っています</translation>
        </message>
        <message>
            <source>Waiting for the engine</source>
            <translation>エンジンを待っています</translation>
        </message>
        <message>
            <source>being timed</source>
            <translation>計測中</translation>
        </message>
        <message>
            <source>being loaded</source>
            <translation>読み込み中</translation>
        </message>
        <message>
            <source>Cancelled: nothing was saved or changed.</source>
            <translation>キャンセルしました。保存も変更もしていません。</translation>
        </message>
        <message>
            <source>Not saved: other programs used {0}% of the CPU, so these figures are too low. Close them or let them finish, then tune again.</source>
            <translation>保存していません。ほかのプログラムがCPUの{0}%を使っていたため、値が低すぎます。それらを閉じるか終了を待ってから、もう一度チューニングしてください。</translation>
        </message>
        <message>
            <source>Saved. Loading the model with it.</source>
            <translation>保存しました。この設定でモデルを読み込みます。</translation>
        </message>
    </context>
    <context>
        <name>RunningJobGuard</name>
        <message>
            <source>A batch job is running.</source>
            <translation>バッチジョブを実行中です。</translation>
        </message>
        <message>
            <source>It stops with the window. No answered row is lost: you can resume it at the next start.</source>
            <translation>ウィンドウとともに停止します。回答済みの行は失われません。次回の起動時に再開できます。</translation>
        </message>
        <message>
            <source>Stop it and close</source>
            <translation>停止して閉じる</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0}件のバッチジョブを実行中です。</numerusform>
            </translation>
        </message>
        <message>
            <source>They stop with the window. No answered row is lost: you can resume them at the next start.</source>
            <translation>ウィンドウとともに停止します。回答済みの行は失われません。次回の起動時に再開できます。</translation>
        </message>
        <message>
            <source>Stop them and close</source>
            <translation>停止して閉じる</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>ウィンドウを開いたままにする</translation>
        </message>
    </context>
    <context>
        <name>SampleCard</name>
        <message>
            <source>Try the first rows</source>
            <translation>最初の数行を試す</translation>
        </message>
        <message>
            <source>See the answers, and how fast they come, before you start the job.</source>
            <translation>ジョブを始める前に、回答とその速さを確認できます。</translation>
        </message>
        <message>
            <source>Answering…</source>
            <translation>回答しています…</translation>
        </message>
        <message>
            <source>Stopped.</source>
            <translation>停止しました。</translation>
        </message>
        <message>
            <source>Answer one row</source>
            <translation>1行に回答</translation>
        </message>
        <message>
            <source>Answer two rows</source>
            <translation>2行に回答</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>Answer three rows</source>
            <translation>3行に回答</translation>
        </message>
    </context>
    <context>
        <name>SamplingPopover</name>
        <message>
            <source>Sampling</source>
            <translation>サンプリング</translation>
        </message>
        <message>
            <source>Recommended</source>
            <translation>推奨</translation>
        </message>
        <message>
            <source>Save as…</source>
            <translation>名前を付けて保存…</translation>
        </message>
        <message>
            <source>Rename…</source>
            <translation>名前を変更…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>削除</translation>
        </message>
        <message>
            <source>Name of the preset</source>
            <translation>プリセットの名前</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>New chats begin with this</source>
            <translation>新しいチャットの既定値です</translation>
        </message>
        <message>
            <source>Use for new chats</source>
            <translation>新しいチャットで使う</translation>
        </message>
        <message>
            <source>The model suggests nothing: {0}</source>
            <translation>モデルの推奨値はありません: {0}</translation>
        </message>
        <message>
            <source>As the model's makers suggest: {0}</source>
            <translation>モデル開発元の推奨値: {0}</translation>
        </message>
        <message>
            <source>{0}: {1}.</source>
            <translation>{0}: {1}。</translation>
        </message>
        <message>
            <source>Recommended: {0}.</source>
            <translation>推奨: {0}。</translation>
        </message>
    </context>
    <context>
        <name>SearchCard</name>
        <message>
            <source>Get a model</source>
            <translation>モデルを入手</translation>
        </message>
        <message>
            <source>Runs well here</source>
            <translation>ここで快適に動く</translation>
        </message>
        <message>
            <source>Apache or MIT licence</source>
            <translation>ApacheまたはMITライセンス</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>サイズ</translation>
        </message>
        <message>
            <source>Any size</source>
            <translation>すべてのサイズ</translation>
        </message>
        <message>
            <source>Up to {0} GB</source>
            <translation>{0} GBまで</translation>
        </message>
        <message>
            <source>Good at</source>
            <translation>得意分野</translation>
        </message>
        <message>
            <source>Good at anything</source>
            <translation>すべての分野</translation>
        </message>
        <message>
            <source>Open its page</source>
            <translation>ページを開く</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>アクセストークン…</translation>
        </message>
        <message>
            <source>Looking at this machine…</source>
            <translation>このマシンを調べています…</translation>
        </message>
        <message>
            <source>Nothing in the catalogue matches: press Enter to search the hub, or remove a filter.</source>
            <translation>該当するものがカタログにありません。EnterでHubを検索するか、絞り込みを減らしてください。</translation>
        </message>
        <message>
            <source>The hub has nothing for “{0}”: try fewer words.</source>
            <translation>Hubに「{0}」は見つかりません。語を減らしてお試しください。</translation>
        </message>
        <message>
            <source>its makers ask you to accept their terms first</source>
            <translation>開発元が先に利用条件への同意を求めています</translation>
        </message>
        <message>
            <source>Licence: {0}</source>
            <translation>ライセンス: {0}</translation>
        </message>
        <message>
            <source>Searching…</source>
            <translation>検索中…</translation>
        </message>
    </context>
    <context>
        <name>SearchLine</name>
        <message>
            <source>Name or words</source>
            <translation>名前や語句</translation>
        </message>
        <message>
            <source>Filters the catalogue; Enter searches the hub, also for ORG/NAME or a link</source>
            <translation>カタログを絞り込みます。EnterでHubを検索（ORG/NAMEやリンクも可）</translation>
        </message>
        <message>
            <source>Search for a model</source>
            <translation>モデルを検索</translation>
        </message>
        <message>
            <source>Search</source>
            <translation>検索</translation>
        </message>
    </context>
    <context>
        <name>SecondTimeline</name>
        <message>
            <source>Second timeline</source>
            <translation>2つ目のタイムライン</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>予測</translation>
        </message>
    </context>
    <context>
        <name>ServedRequests</name>
        <message>
            <source>Time</source>
            <translation>時刻</translation>
        </message>
        <message>
            <source>Program</source>
            <translation>プログラム</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Read</source>
            <translation>読み取り</translation>
        </message>
        <message>
            <source>Written</source>
            <translation>生成</translation>
        </message>
        <message>
            <source>Seconds</source>
            <translation>秒</translation>
        </message>
        <message>
            <source>Outcome</source>
            <translation>結果</translation>
        </message>
        <message>
            <source>answered</source>
            <translation>回答済み</translation>
        </message>
        <message>
            <source>client left</source>
            <translation>切断</translation>
        </message>
        <message>
            <source>wrong key</source>
            <translation>キーが違います</translation>
        </message>
        <message>
            <source>refused ({0})</source>
            <translation>拒否（{0}）</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失敗</translation>
        </message>
        <message>
            <source>{0}, {1}: {2}; {3} tokens read, {4} written, {5} s</source>
            <translation>{0}、{1}: {2}、読み取り{3}トークン、生成{4}トークン、{5}秒</translation>
        </message>
    </context>
    <context>
        <name>ServerDialog</name>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>テスト</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>サーバーを追加</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>アドレス</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>名前</translation>
        </message>
        <message>
            <source>same as its host</source>
            <translation>ホストと同じ</translation>
        </message>
        <message>
            <source>none</source>
            <translation>なし</translation>
        </message>
        <message>
            <source>as it is kept</source>
            <translation>保存済みのまま</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>キー</translation>
        </message>
        <message>
            <source>Certificate</source>
            <translation>証明書</translation>
        </message>
        <message>
            <source>those that the system trusts</source>
            <translation>システムが信頼するもの</translation>
        </message>
        <message>
            <source>Choose…</source>
            <translation>選択…</translation>
        </message>
        <message>
            <source>Choose a certificate's file</source>
            <translation>証明書ファイルを選択</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Requests at once</source>
            <translation>同時リクエスト数</translation>
        </message>
        <message>
            <source>as measured</source>
            <translation>測定どおり</translation>
        </message>
        <message>
            <source>Requests a minute</source>
            <translation>1分あたりのリクエスト数</translation>
        </message>
        <message>
            <source>no limit</source>
            <translation>無制限</translation>
        </message>
        <message>
            <source>Tokens a minute</source>
            <translation>1分あたりのトークン数</translation>
        </message>
        <message>
            <source>Price of a million tokens read</source>
            <translation>読み取り100万トークンの価格</translation>
        </message>
        <message>
            <source>Price of a million tokens written</source>
            <translation>生成100万トークンの価格</translation>
        </message>
        <message>
            <source>Currency</source>
            <translation>通貨</translation>
        </message>
        <message>
            <source>Trust its certificate…</source>
            <translation>証明書を信頼する…</translation>
        </message>
        <message>
            <source>Per million tokens read</source>
            <translation>読み取り100万トークンあたり</translation>
        </message>
        <message>
            <source>Per million tokens written</source>
            <translation>生成100万トークンあたり</translation>
        </message>
        <message>
            <source>price not known</source>
            <translation>価格不明</translation>
        </message>
        <message>
            <source>Chosen in each chat</source>
            <translation>チャットごとに選択</translation>
        </message>
        <message>
            <source>Less</source>
            <translation>簡易表示</translation>
        </message>
        <message>
            <source>More: certificate, model, limits and prices</source>
            <translation>詳細: 証明書、モデル、制限、価格</translation>
        </message>
        <message>
            <source>It is tested before it is kept: that asks a model for a few tokens. The key is kept in the system's keyring, or for this run only where there is none.</source>
            <translation>保存前にテストします。その際モデルに数トークンを要求します。キーはシステムのキーリングに保存します。ない場合は今回の実行中のみです。</translation>
        </message>
        <message>
            <source>Asking {0}…</source>
            <translation>{0}に問い合わせています…</translation>
        </message>
        <message>
            <source>It answers in {0} ms.</source>
            <translation>{0} msで応答します。</translation>
        </message>
        <message>
            <source>It answers in {0} ms; the first token came after {1} s.</source>
            <translation>{0} msで応答します。最初のトークンまで{1}秒でした。</translation>
        </message>
        <message>
            <source>Choose a model and test again to see what it can do.</source>
            <translation>モデルを選んでもう一度テストすると、できることがわかります。</translation>
        </message>
        <message>
            <source>Its fingerprint (SHA-256) is
{0}
Compare it with what that server shows: “switchyard serve --https” prints it. Only this certificate is trusted for this server then.</source>
            <translation>フィンガープリント（SHA-256）は
{0}
です。そのサーバーの表示と照合してください（「switchyard serve --https」で表示されます）。以後、このサーバーではこの証明書だけを信頼します。</translation>
        </message>
        <message>
            <source>Trust the certificate of {0}?</source>
            <translation>{0}の証明書を信頼しますか?</translation>
        </message>
        <message>
            <source>Trust it</source>
            <translation>信頼する</translation>
        </message>
        <message>
            <source>Certificates (*.pem *.crt *.cer)</source>
            <translation>証明書 (*.pem *.crt *.cer)</translation>
        </message>
        <message>
            <source>The server's certificate</source>
            <translation>サーバーの証明書</translation>
        </message>
    </context>
    <context>
        <name>Servers</name>
        <message>
            <source>Not tested yet.</source>
            <translation>未テスト。</translation>
        </message>
        <message>
            <source>A server with OpenAI's interface</source>
            <translation>OpenAIインターフェイスのサーバー</translation>
        </message>
        <message>
            <source>no model</source>
            <translation>モデルなし</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0}、ほか{1}件</translation>
        </message>
        <message>
            <source>{0} or {1}</source>
            <translation>{0}、{1}</translation>
        </message>
        <message>
            <source>It cannot {0}.</source>
            <translation>対応していません: {0}。</translation>
        </message>
        <message>
            <source>Models that read text only, no pictures: {0}.</source>
            <translation>テキストのみで画像を読まないモデル: {0}。</translation>
        </message>
        <message>
            <source>It reads text only, no pictures.</source>
            <translation>テキストのみで、画像は読みません。</translation>
        </message>
        <message>
            <source>send answers as they are written</source>
            <translation>生成途中の回答の送信</translation>
        </message>
        <message>
            <source>count tokens</source>
            <translation>トークンの計数</translation>
        </message>
        <message>
            <source>call tools</source>
            <translation>ツールの呼び出し</translation>
        </message>
        <message>
            <source>keep to a schema</source>
            <translation>スキーマの遵守</translation>
        </message>
        <message>
            <source>take top-k, min-p or a repetition penalty</source>
            <translation>top-k、min-p、繰り返しペナルティの指定</translation>
        </message>
        <message>
            <source>{0} at once</source>
            <translation>同時に{0}</translation>
        </message>
        <message>
            <source>{0} requests a minute</source>
            <translation>1分あたり{0}リクエスト</translation>
        </message>
        <message>
            <source>{0} tokens a minute</source>
            <translation>1分あたり{0}トークン</translation>
        </message>
        <message>
            <source>a million tokens read: {0}{1}</source>
            <translation>読み取り100万トークン: {0}{1}</translation>
        </message>
        <message>
            <source>written: {0}{1}</source>
            <translation>生成: {0}{1}</translation>
        </message>
    </context>
    <context>
        <name>ServersCard</name>
        <message>
            <source>Remote servers</source>
            <translation>リモートサーバー</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>追加…</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>サーバーを追加</translation>
        </message>
        <message>
            <source>vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you choose it.</source>
            <translation>vLLM、SGLang、llama.cpp、Ollama、別のSwitchyardなど。テキストは、サーバーを選んだチャットとジョブでのみ送られます。</translation>
        </message>
        <message>
            <source>Look on this network</source>
            <translation>このネットワークを探す</translation>
        </message>
        <message>
            <source>Models that run elsewhere</source>
            <translation>ほかの場所で動くモデル</translation>
        </message>
        <message>
            <source>Looking…</source>
            <translation>探しています…</translation>
        </message>
        <message>
            <source>No Switchyard answered. One does if it was started with “switchyard serve --host 0.0.0.0 --https --announce NAME” in this network.</source>
            <translation>応答したSwitchyardはありません。このネットワークで「switchyard serve --host 0.0.0.0 --https --announce NAME」として起動したものが応答します。</translation>
        </message>
        <message>
            <source>All that answered are in the list.</source>
            <translation>応答したものはすべて一覧にあります。</translation>
        </message>
        <message>
            <source>Add {0}</source>
            <translation>{0}を追加</translation>
        </message>
        <message>
            <source>Found on this network · {0}</source>
            <translation>このネットワークで検出 · {0}</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>編集…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>{0}を編集</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>削除</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>{0}を削除</translation>
        </message>
        <message>
            <source>Its key is removed, too. Chats that were held with it stay; nothing else answers in them by itself.</source>
            <translation>キーも削除されます。このサーバーとのチャットは残りますが、ほかのものが勝手に回答することはありません。</translation>
        </message>
        <message>
            <source>Remove {0}?</source>
            <translation>{0}を削除しますか?</translation>
        </message>
    </context>
    <context>
        <name>SessionsButton</name>
        <message>
            <source>Sessions</source>
            <translation>セッション</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>読み込み中…</translation>
        </message>
        <message>
            <source>None yet: ask something in Chat</source>
            <translation>まだありません。チャットで質問してください</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>開く</translation>
        </message>
        <message>
            <source>Compare with</source>
            <translation>比較する</translation>
        </message>
        <message>
            <source>The session could not be read.</source>
            <translation>セッションを読めませんでした。</translation>
        </message>
    </context>
    <context>
        <name>Setting</name>
        <message>
            <source>Automatic</source>
            <translation>自動</translation>
        </message>
        <message>
            <source>Speed and memory</source>
            <translation>速度とメモリ</translation>
        </message>
        <message>
            <source>Runs on</source>
            <translation>実行先</translation>
        </message>
        <message>
            <source>Automatic takes the graphics card, if there is one, and the processor for what does not fit.</source>
            <translation>「自動」は、グラフィックスカードがあれば使い、入りきらない分はプロセッサで処理します。</translation>
        </message>
        <message>
            <source>Processor only</source>
            <translation>プロセッサのみ</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>精度</translation>
        </message>
        <message>
            <source>Automatic keeps the best that fits. Lower precision takes less memory and is faster.</source>
            <translation>「自動」は収まる中で最もよい精度を使います。粗い重みほどメモリが少なく、高速です。</translation>
        </message>
        <message>
            <source>Graphics memory to use</source>
            <translation>使用するグラフィックスメモリ</translation>
        </message>
        <message>
            <source>For experts that are used often; the rest is left to other programs.</source>
            <translation>よく使うエキスパートに使います。残りはほかのプログラムのために空けておきます。</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>使用するRAM</translation>
        </message>
        <message>
            <source>For the model; what does not fit is read from the disk again and again.</source>
            <translation>モデルに使います。入りきらない分は毎回ディスクから読み込みます。</translation>
        </message>
        <message>
            <source>CPU threads</source>
            <translation>CPUスレッド数</translation>
        </message>
        <message>
            <source>Automatic uses one per core. Fewer leave room for other programs.</source>
            <translation>「自動」はコアごとに1つ使います。減らすとほかのプログラムに余裕ができます。</translation>
        </message>
        <message>
            <source>For experts</source>
            <translation>上級者向け</translation>
        </message>
        <message>
            <source>Experts on each card</source>
            <translation>各カードに置くエキスパート</translation>
        </message>
        <message>
            <source>Automatic keeps as many as fit; 0 keeps none.</source>
            <translation>自動では入るだけ保持します。0 では保持しません。</translation>
        </message>
        <message>
            <source>Slots for each layer</source>
            <translation>層ごとのスロット</translation>
        </message>
        <message>
            <source>Automatic lets all layers share the slots; a number gives each layer that many of its own.</source>
            <translation>自動では全層がスロットを共有します。数を指定すると、各層がその数だけ専有します。</translation>
        </message>
        <message>
            <source>Which experts stay on the card</source>
            <translation>カードに残すエキスパート</translation>
        </message>
        <message>
            <source>Automatic watches which rule would have kept the right ones, and takes that one.</source>
            <translation>「自動」は、どの規則が正しく残せていたかを観察し、それを採用します。</translation>
        </message>
        <message>
            <source>Recently used ones</source>
            <translation>最近使ったもの</translation>
        </message>
        <message>
            <source>Newest ones</source>
            <translation>新しいもの</translation>
        </message>
        <message>
            <source>Often used ones</source>
            <translation>よく使うもの</translation>
        </message>
        <message>
            <source>Recently and often used ones</source>
            <translation>最近よく使ったもの</translation>
        </message>
        <message>
            <source>Random ones</source>
            <translation>ランダム</translation>
        </message>
        <message>
            <source>Popular ones, fixed</source>
            <translation>人気のもの（固定）</translation>
        </message>
        <message>
            <source>Experts that are not on the card</source>
            <translation>カードにないエキスパート</translation>
        </message>
        <message>
            <source>All but the first are for comparisons.</source>
            <translation>最初のもの以外は比較用です。</translation>
        </message>
        <message>
            <source>Whichever is faster</source>
            <translation>速い方</translation>
        </message>
        <message>
            <source>Processor computes</source>
            <translation>プロセッサーで計算</translation>
        </message>
        <message>
            <source>Card fetches</source>
            <translation>カードに転送</translation>
        </message>
        <message>
            <source>Nothing is kept</source>
            <translation>何も保持しない</translation>
        </message>
        <message>
            <source>Whole layers</source>
            <translation>層ごとまとめて</translation>
        </message>
        <message>
            <source>Guessing which experts come next</source>
            <translation>次のエキスパートの予測</translation>
        </message>
        <message>
            <source>Guessed experts are copied to the card in advance. Automatic uses what pays off, if anything does.</source>
            <translation>予測したエキスパートを先にカードへコピーします。自動では、効果があるものだけを使います。</translation>
        </message>
        <message>
            <source>Off</source>
            <translation>オフ</translation>
        </message>
        <message>
            <source>Those of the last token</source>
            <translation>直前のトークンと同じもの</translation>
        </message>
        <message>
            <source>The next layer’s router</source>
            <translation>次の層のルーター</translation>
        </message>
        <message>
            <source>What usually follows</source>
            <translation>よく続くもの</translation>
        </message>
        <message>
            <source>A trained predictor</source>
            <translation>学習した予測器</translation>
        </message>
        <message>
            <source>Replay steps on the card</source>
            <translation>カードでステップを再生</translation>
        </message>
        <message>
            <source>The card replays a recorded step (a CUDA graph) instead of being told each operation.</source>
            <translation>操作を一つずつ指示する代わりに、記録したステップ（CUDA グラフ）をカードが再生します。</translation>
        </message>
        <message>
            <source>On</source>
            <translation>オン</translation>
        </message>
        <message>
            <source>Several graphics cards</source>
            <translation>複数のグラフィックカード</translation>
        </message>
        <message>
            <source>By layers, each card has a run of layers; by experts, each has a part of every layer’s experts.</source>
            <translation>層で分けると各カードが連続した層を、エキスパートで分けると各層のエキスパートの一部を受け持ちます。</translation>
        </message>
        <message>
            <source>By layers</source>
            <translation>層で分ける</translation>
        </message>
        <message>
            <source>By experts</source>
            <translation>エキスパートで分ける</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Speculative decoding</source>
            <translation>投機的デコード</translation>
        </message>
        <message>
            <source>Answers that quote, such as edits of a text, come faster: likely next words are tried together, only as long as that pays. Answers stay the same.</source>
            <translation>文章の編集など、引用を含む回答が速くなります。次に来そうな語をまとめて試し、効果がある間だけ使います。回答の内容は変わりません。</translation>
        </message>
        <message>
            <source>Where it pays</source>
            <translation>効果があるとき</translation>
        </message>
        <message>
            <source>With the model’s own layer</source>
            <translation>モデルの専用層で</translation>
        </message>
        <message>
            <source>Keys and values</source>
            <translation>キーとバリュー</translation>
        </message>
        <message>
            <source>What the model keeps of a conversation. int8 takes about half the memory; answers may differ slightly (with the starter, perplexity rose by 0.08%).</source>
            <translation>モデルが会話について保持する内容です。int8ではメモリが約半分になりますが、回答がわずかに変わることがあります（スターターモデルではパープレキシティが0.08%上昇）。</translation>
        </message>
        <message>
            <source>As in the model</source>
            <translation>モデルのまま</translation>
        </message>
        <message>
            <source>Appearance</source>
            <translation>外観</translation>
        </message>
        <message>
            <source>Theme</source>
            <translation>テーマ</translation>
        </message>
        <message>
            <source>System follows the desktop's setting.</source>
            <translation>「システム」はデスクトップの設定に従います。</translation>
        </message>
        <message>
            <source>System</source>
            <translation>システム</translation>
        </message>
        <message>
            <source>Light</source>
            <translation>ライト</translation>
        </message>
        <message>
            <source>Dark</source>
            <translation>ダーク</translation>
        </message>
        <message>
            <source>Language</source>
            <translation>言語</translation>
        </message>
        <message>
            <source>System is the language of this PC, or English.</source>
            <translation>「システム」はこのPCの言語、なければ英語です。</translation>
        </message>
        <message>
            <source>Text size</source>
            <translation>文字サイズ</translation>
        </message>
        <message>
            <source>Of everything in this window.</source>
            <translation>このウィンドウ全体に適用されます。</translation>
        </message>
        <message>
            <source>Default model</source>
            <translation>既定のモデル</translation>
        </message>
        <message>
            <source>Loaded when Switchyard starts.</source>
            <translation>Switchyardの起動時に読み込まれます。</translation>
        </message>
        <message>
            <source>Free the memory after</source>
            <translation>メモリを解放するまでの時間</translation>
        </message>
        <message>
            <source>If the model is not used for this long; the next question loads it again.</source>
            <translation>この時間モデルが使われない場合に解放します。次の質問で再び読み込みます。</translation>
        </message>
        <message>
            <source>Never</source>
            <translation>しない</translation>
        </message>
        <message>
            <source>Batch jobs at once</source>
            <translation>同時実行するバッチジョブ</translation>
        </message>
        <message>
            <source>They share each pass through the model; others wait for their turn.</source>
            <translation>モデルへの各パスを共有します。残りのジョブは順番を待ちます。</translation>
        </message>
        <message>
            <source>Quick question</source>
            <translation>クイック質問</translation>
        </message>
        <message>
            <source>Icon in the tray</source>
            <translation>トレイにアイコンを表示</translation>
        </message>
        <message>
            <source>Click it to ask a question from anywhere, in a small window above the others.</source>
            <translation>クリックすると、ほかのウィンドウの上の小さなウィンドウで、どこからでも質問できます。</translation>
        </message>
        <message>
            <source>Keep running when the window is closed</source>
            <translation>ウィンドウを閉じても動作を続ける</translation>
        </message>
        <message>
            <source>The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q.</source>
            <translation>モデルはメモリに残り、回答とバッチジョブが続きます。終了はアイコンのメニューかCtrl+Qで行います。</translation>
        </message>
        <message>
            <source>API server</source>
            <translation>APIサーバー</translation>
        </message>
        <message>
            <source>Let apps use the models of this PC</source>
            <translation>ほかのアプリにこのPCのモデルを使わせる</translation>
        </message>
        <message>
            <source>Who may use it</source>
            <translation>利用できる範囲</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>このPC</translation>
        </message>
        <message>
            <source>This PC, with key</source>
            <translation>このPC、キーあり</translation>
        </message>
        <message>
            <source>Network, with key</source>
            <translation>ネットワーク、キーあり</translation>
        </message>
        <message>
            <source>Port</source>
            <translation>ポート</translation>
        </message>
        <message>
            <source>Choose another if a program on this PC already uses it.</source>
            <translation>ほかのプログラムが使用中なら、別の番号にしてください。</translation>
        </message>
        <message>
            <source>Free them after</source>
            <translation>解放するまでの時間</translation>
        </message>
        <message>
            <source>A model that a program asked for is freed once no program has used it for this long.</source>
            <translation>プログラムが要求したモデルは、この時間どのプログラムにも使われないと解放されます。</translation>
        </message>
        <message>
            <source>Keep loaded</source>
            <translation>読み込んだままにする</translation>
        </message>
        <message>
            <source>My model makes room for them</source>
            <translation>自分のモデルが場所を譲る</translation>
        </message>
        <message>
            <source>Where both do not fit, yours is put aside, and loaded again for your next question.</source>
            <translation>両方が入りきらない場合、あなたのモデルをいったん外し、次の質問で再び読み込みます。</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>モニター</translation>
        </message>
        <message>
            <source>Record sessions</source>
            <translation>セッションを記録</translation>
        </message>
        <message>
            <source>Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this machine and take up to 512 MB; the oldest are deleted.</source>
            <translation>モニターで後から開ける時間と計数の記録です。プロンプトや回答は含まれません。このマシンに最大512 MB保存され、古いものから削除されます。</translation>
        </message>
        <message>
            <source>Updates</source>
            <translation>更新</translation>
        </message>
        <message>
            <source>Check for updates</source>
            <translation>更新を確認する</translation>
        </message>
        <message>
            <source>Once a day, at the start. Nothing about you is sent, and nothing is downloaded without asking.</source>
            <translation>1日に1回、起動時に確認します。あなたに関する情報は送信されず、確認なしにダウンロードすることもありません。</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>温度</translation>
        </message>
        <message>
            <source>0 always takes the likeliest token; higher is more varied</source>
            <translation>0は常に最も確率の高いトークンを選び、高いほど多様になります</translation>
        </message>
        <message>
            <source>Top-k</source>
            <translation>Top-k</translation>
        </message>
        <message>
            <source>Sample from the k likeliest tokens</source>
            <translation>確率の高い上位k個のトークンから選びます</translation>
        </message>
        <message>
            <source>off</source>
            <translation>オフ</translation>
        </message>
        <message>
            <source>Top-p</source>
            <translation>Top-p</translation>
        </message>
        <message>
            <source>Sample from the likeliest tokens with a total probability of p; 1 is off</source>
            <translation>合計確率がpになるまでの上位トークンから選びます。1でオフ</translation>
        </message>
        <message>
            <source>Min-p</source>
            <translation>Min-p</translation>
        </message>
        <message>
            <source>Drop tokens below this share of the likeliest one's probability; 0 is off</source>
            <translation>最も確率の高いトークンに対する割合がこれ未満のトークンを除外します。0でオフ</translation>
        </message>
        <message>
            <source>Repetition penalty</source>
            <translation>繰り返しペナルティ</translation>
        </message>
        <message>
            <source>Above 1, tokens already used become less likely; 1 is off</source>
            <translation>1より大きいと、すでに使われたトークンが出にくくなります。1でオフ</translation>
        </message>
        <message>
            <source>Seed</source>
            <translation>シード</translation>
        </message>
        <message>
            <source>The same seed gives the same answer to the same chat</source>
            <translation>同じシードなら、同じチャットに同じ回答を返します</translation>
        </message>
        <message>
            <source>random</source>
            <translation>ランダム</translation>
        </message>
        <message>
            <source>Stop strings</source>
            <translation>停止文字列</translation>
        </message>
        <message>
            <source>An answer ends before the first of these</source>
            <translation>これらのいずれかが現れる手前で回答を終えます</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>最大トークン数</translation>
        </message>
        <message>
            <source>Answers stop at this length</source>
            <translation>回答はこの長さで止まります</translation>
        </message>
        <message>
            <source>Beams</source>
            <translation>ビーム</translation>
        </message>
        <message>
            <source>Beam search if above 1; ignores temperature, top-k, top-p and min-p</source>
            <translation>1より大きいとビームサーチになり、温度、top-k、top-p、min-pは無視されます</translation>
        </message>
        <message>
            <source>Loop guard</source>
            <translation>ループ防止</translation>
        </message>
        <message>
            <source>Ends loops (DRY): what would repeat earlier text becomes less likely; 0 is off, 0.8 is usual</source>
            <translation>ループを止めます（DRY）。以前のテキストの繰り返しが出にくくなります。0でオフ、通常は0.8</translation>
        </message>
        <message>
            <source>Guard: growth</source>
            <translation>防止: 増加</translation>
        </message>
        <message>
            <source>How much stronger the loop guard gets with each repeated token</source>
            <translation>トークンが1つ繰り返されるごとに強まる度合い</translation>
        </message>
        <message>
            <source>Guard: length</source>
            <translation>防止: 長さ</translation>
        </message>
        <message>
            <source>Repetitions shorter than this many tokens are free</source>
            <translation>このトークン数より短い繰り返しは許可します</translation>
        </message>
        <message>
            <source>Guard: range</source>
            <translation>防止: 範囲</translation>
        </message>
        <message>
            <source>How many of the last tokens, earlier messages included, are searched; by default only the answer</source>
            <translation>以前のメッセージを含め、直近の何トークンを調べるか。既定では回答のみ</translation>
        </message>
        <message>
            <source>answer</source>
            <translation>回答</translation>
        </message>
        <message>
            <source>Guard: ends at</source>
            <translation>防止: 区切り</translation>
        </message>
        <message>
            <source>Repetitions are not followed across these texts; \n is a line break</source>
            <translation>これらのテキストをまたいで繰り返しを追いません。\nは改行です</translation>
        </message>
        <message>
            <source>Presence penalty</source>
            <translation>存在ペナルティ</translation>
        </message>
        <message>
            <source>Makes every token that the answer has already less likely, once; 0 is off</source>
            <translation>回答にすでにあるトークンを一度だけ出にくくします。0でオフ</translation>
        </message>
        <message>
            <source>Frequency penalty</source>
            <translation>頻度ペナルティ</translation>
        </message>
        <message>
            <source>Makes tokens less likely with each time that the answer has them already; 0 is off</source>
            <translation>回答にすでに出た回数に応じてトークンを出にくくします。0でオフ</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>Whether the model reasons before it answers; its thoughts count as tokens of the answer</source>
            <translation>回答の前にモデルが考えるかどうか。思考も回答のトークンに数えます</translation>
        </message>
        <message>
            <source>As the model does</source>
            <translation>モデルに任せる</translation>
        </message>
        <message>
            <source>Low</source>
            <translation>低</translation>
        </message>
        <message>
            <source>Medium</source>
            <translation>中</translation>
        </message>
        <message>
            <source>High</source>
            <translation>高</translation>
        </message>
        <message>
            <source>Keep chats' computed context on disk</source>
            <translation>チャットの計算済みコンテキストをディスクに残す</translation>
        </message>
        <message>
            <source>A chat then goes on at once after another one or a restart: what the model has read need not be read again. It is made of your prompts and answers, encrypted, and removed with its chat. The key is in the system's keyring; where there is none it is a file beside the settings, and whoever can read your files can decrypt it. Turning this off removes what is kept.</source>
            <translation>別のチャットや再起動の後でも、すぐに続きを始められます。モデルが一度読んだ内容を読み直す必要がありません。プロンプトと回答から作られ、暗号化され、チャットとともに削除されます。鍵はシステムのキーリングにあります。キーリングがない場合は設定の横のファイルになり、あなたのファイルを読める人は復号できます。オフにすると保存済みのものは削除されます。</translation>
        </message>
        <message>
            <source>At most</source>
            <translation>最大</translation>
        </message>
        <message>
            <source>What was of no use for longest is removed first. 2 GB of the disk always stay free.</source>
            <translation>最も長く使われていないものから削除します。ディスクには常に2 GBの空きを残します。</translation>
        </message>
    </context>
    <context>
        <name>Settings</name>
        <message>
            <source>The settings could not be saved to {0} ({1}); free some space or check its permissions.</source>
            <translation>設定を{0}に保存できませんでした（{1}）。空きを増やすか、アクセス権をご確認ください。</translation>
        </message>
        <message>
            <source>The settings in {0} could not be read ({1}), so the defaults are used.</source>
            <translation>{0}の設定を読めませんでした（{1}）。既定値を使います。</translation>
        </message>
        <message>
            <source>Some settings in {0} make no sense ({1}): the usual ones are used instead of these.</source>
            <translation>{0} に意味をなさない設定があります（{1}）。これらには既定値を使います。</translation>
        </message>
        <message>
            <source>The settings file was damaged; it is kept as {0}, and the defaults are used.</source>
            <translation>設定ファイルが壊れていました。{0}として残し、既定値を使います。</translation>
        </message>
    </context>
    <context>
        <name>SettingsCard</name>
        <message>
            <source>Hide</source>
            <translation>隠す</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>表示</translation>
        </message>
        <message>
            <source>Needs a reload.</source>
            <translation>再読み込みが必要です。</translation>
        </message>
        <message>
            <source>Needs a restart.</source>
            <translation>再起動が必要です。</translation>
        </message>
        <message>
            <source>{0} px</source>
            <translation>{0} px</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>空きすべて</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>最大{0}</translation>
        </message>
        <message>
            <source>none; separate with commas</source>
            <translation>なし（コンマで区切る）</translation>
        </message>
    </context>
    <context>
        <name>SettingsPage</name>
        <message>
            <source>This desktop has no tray for icons.</source>
            <translation>このデスクトップにはアイコンを表示するトレイがありません。</translation>
        </message>
        <message>
            <source>No setting has these words.</source>
            <translation>該当する設定はありません。</translation>
        </message>
        <message>
            <source>Find a setting</source>
            <translation>設定を検索</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>設定</translation>
        </message>
    </context>
    <context>
        <name>SharedSettingsCard</name>
        <message>
            <source>Template</source>
            <translation>テンプレート</translation>
        </message>
        <message>
            <source>Input</source>
            <translation>入力</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>結果</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>Answered by</source>
            <translation>回答元</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>最大トークン数</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>温度</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>回答の形式</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>システムプロンプト</translation>
        </message>
        <message>
            <source>Each row's own messages</source>
            <translation>各行のメッセージ</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>スキーマに沿ったJSON</translation>
        </message>
        <message>
            <source>one of {0}</source>
            <translation>次のいずれか: {0}</translation>
        </message>
        <message>
            <source>text</source>
            <translation>テキスト</translation>
        </message>
        <message>
            <source>0 (the likeliest token)</source>
            <translation>0（最も確率の高いトークン）</translation>
        </message>
        <message>
            <source>none</source>
            <translation>なし</translation>
        </message>
        <message>
            <source>the servers' own</source>
            <translation>サーバーの既定</translation>
        </message>
        <message>
            <source>the loaded one</source>
            <translation>読み込み済みのもの</translation>
        </message>
        <message>
            <source>this PC</source>
            <translation>このPC</translation>
        </message>
        <message>
            <source>the Ray cluster at {0}</source>
            <translation>Rayクラスター（{0}）</translation>
        </message>
    </context>
    <context>
        <name>ShortcutsDialog</name>
        <message>
            <source>Keyboard shortcuts</source>
            <translation>キーボードショートカット</translation>
        </message>
    </context>
    <context>
        <name>SideBySide</name>
        <message>
            <source>Side by side</source>
            <translation>並べて表示</translation>
        </message>
        <message>
            <source>Question for both</source>
            <translation>両方への質問</translation>
        </message>
        <message>
            <source>One question for both</source>
            <translation>両方に同じ質問</translation>
        </message>
        <message>
            <source>Ask both</source>
            <translation>両方に質問</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>The model here</source>
            <translation>ここのモデル</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>唯一のモデル</translation>
        </message>
        <message>
            <source>This chat is being answered: wait for the end, or stop it.</source>
            <translation>このチャットは回答中です。終わるまで待つか、停止してください。</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>Choose another model or other settings for one of them.</source>
            <translation>どちらかに別のモデルか別の設定を選んでください。</translation>
        </message>
        <message>
            <source>One model is open at a time on this PC: the second is loaded when the first has answered.</source>
            <translation>このPCで開けるモデルは一度に1つです。1つ目の回答後に2つ目を読み込みます。</translation>
        </message>
        <message>
            <source>Both answers are kept in the chat, as versions of one turn.</source>
            <translation>両方の回答が、同じやり取りのバージョンとしてチャットに残ります。</translation>
        </message>
    </context>
    <context>
        <name>Sidebar</name>
        <message>
            <source>Navigation</source>
            <translation>ナビゲーション</translation>
        </message>
        <message>
            <source>Go to {0}</source>
            <translation>{0}に移動</translation>
        </message>
    </context>
    <context>
        <name>SizeChooser</name>
        <message>
            <source>Experts kept in this tier</source>
            <translation>この階層に保持するエキスパート</translation>
        </message>
        <message>
            <source>Experts kept</source>
            <translation>保持するエキスパート</translation>
        </message>
        <message>
            <source>Resize</source>
            <translation>サイズ変更</translation>
        </message>
        <message>
            <source>Lasts until the model is reloaded; Tune sets a permanent size.</source>
            <translation>モデルを再読み込みするまで有効です。恒久的なサイズは「チューニング」で設定します。</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>元に戻す</translation>
        </message>
    </context>
    <context>
        <name>SourceRow</name>
        <message>
            <source>Sources</source>
            <translation>出典</translation>
        </message>
        <message>
            <source> p. {0}</source>
            <translation> {0}ページ</translation>
        </message>
        <message>
            <source>Source {0}: {1}</source>
            <translation>出典 {0}: {1}</translation>
        </message>
    </context>
    <context>
        <name>StarterDownload</name>
        <message>
            <source>The download could not be started: reinstall Switchyard.</source>
            <translation>ダウンロードを開始できませんでした。Switchyardを再インストールしてください。</translation>
        </message>
        <message>
            <source>The starter model could not be built; try again.</source>
            <translation>スターターモデルを作成できませんでした。もう一度お試しください。</translation>
        </message>
    </context>
    <context>
        <name>StarterOffer</name>
        <message>
            <source>Download of the starter model</source>
            <translation>スターターモデルのダウンロード</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>再試行</translation>
        </message>
        <message>
            <source>Get the starter (93 MB)</source>
            <translation>スターターモデルを入手 (93 MB)</translation>
        </message>
        <message>
            <source>Getting the starter model…</source>
            <translation>スターターモデルを入手しています…</translation>
        </message>
        <message>
            <source>Stopping…</source>
            <translation>停止しています…</translation>
        </message>
        <message>
            <source>Getting the starter model, {0}% done…</source>
            <translation>スターターモデルを入手しています、{0}%完了…</translation>
        </message>
    </context>
    <context>
        <name>StepBar</name>
        <message>
            <source>Steps</source>
            <translation>手順</translation>
        </message>
        <message>
            <source>Your machine</source>
            <translation>あなたのマシン</translation>
        </message>
        <message>
            <source>Measure</source>
            <translation>測定</translation>
        </message>
        <message>
            <source>Plan</source>
            <translation>プラン</translation>
        </message>
        <message>
            <source>Timed tokens</source>
            <translation>実測</translation>
        </message>
        <message>
            <source>Step {0}: {1}</source>
            <translation>手順{0}: {1}</translation>
        </message>
        <message>
            <source>Alt+{0}</source>
            <translation>Alt+{0}</translation>
        </message>
    </context>
    <context>
        <name>SummaryCard</name>
        <message>
            <source>Open Tune</source>
            <translation>チューニングを開く</translation>
        </message>
        <message>
            <source>The engine is starting.</source>
            <translation>エンジンを起動しています。</translation>
        </message>
        <message>
            <source>The model is loading.</source>
            <translation>モデルを読み込んでいます。</translation>
        </message>
        <message>
            <source>The engine has stopped.</source>
            <translation>エンジンが停止しました。</translation>
        </message>
        <message>
            <source>Its recording is still here; the machine's lanes continue.</source>
            <translation>記録は残っています。マシンのレーンは続きます。</translation>
        </message>
        <message>
            <source>Nothing computed yet.</source>
            <translation>まだ何も計算していません。</translation>
        </message>
        <message>
            <source>Ask something in Chat and watch it here.</source>
            <translation>チャットで質問して、ここで様子をご覧ください。</translation>
        </message>
        <message>
            <source>No model is loaded.</source>
            <translation>モデルが読み込まれていません。</translation>
        </message>
        <message>
            <source>The machine is still shown. Load a model in Settings, then ask something in Chat.</source>
            <translation>マシンの状態は引き続き表示されます。設定でモデルを読み込み、チャットで質問してください。</translation>
        </message>
        <message>
            <source>Nothing was decoded in this session.</source>
            <translation>このセッションでは何もデコードされていません。</translation>
        </message>
        <message>
            <source>Nothing has been decoded yet.</source>
            <translation>まだ何もデコードしていません。</translation>
        </message>
        <message>
            <source>Their time went to: {0}.</source>
            <translation>時間の内訳: {0}。</translation>
        </message>
        <message>
            <source>Its time went to: {0}.</source>
            <translation>時間の内訳: {0}。</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU, which slows everything down.</source>
            <translation>ほかのプログラムがCPUの{0}%を使っており、全体が遅くなっています。</translation>
        </message>
        <message>
            <source>A picture was read first, in {0} s.</source>
            <translation>その前に画像を 1 枚、{0} 秒で読み取りました。</translation>
        </message>
        <message>
            <source>{0} pictures were read first, in {1} s.</source>
            <translation>その前に画像を {0} 枚、{1} 秒で読み取りました。</translation>
        </message>
        <message>
            <source>Batch: last {0} tokens, {1} per step, {2}/s.</source>
            <translation>バッチ: 直近{0}トークン、ステップあたり{1}、{2}/秒。</translation>
        </message>
        <message>
            <source>The last token took {0} ms.</source>
            <translation>直前のトークンに{0} msかかりました。</translation>
        </message>
        <message numerus="yes">
            <source>Last {0} tokens, {1}/s.</source>
            <translation>
                <numerusform>直近{0}トークン、{1}/秒。</numerusform>
            </translation>
        </message>
        <message>
            <source>Close or pause them first; further advice needs an idle machine.</source>
            <translation>先にそれらを閉じるか一時停止してください。その他の助言には空いたマシンが必要です。</translation>
        </message>
        <message>
            <source>{0} CPU threads would be about {1} times as fast (predicted).</source>
            <translation>CPUスレッドを{0}にすると約{1}倍の速さになります（予測）。</translation>
        </message>
        <message>
            <source>With {0} experts kept in VRAM it would be about {1} times as fast (predicted).</source>
            <translation>{0} 個のエキスパートを VRAM に置くと、約 {1} 倍の速さになります（予測）。</translation>
        </message>
        <message>
            <source>With {0} experts kept in RAM it would be about {1} times as fast (predicted).</source>
            <translation>{0} 個のエキスパートを RAM に置くと、約 {1} 倍の速さになります（予測）。</translation>
        </message>
        <message>
            <source>{0} weights would be about {1} times as fast (predicted).</source>
            <translation>重みを{0}にすると約{1}倍の速さになります（予測）。</translation>
        </message>
        <message>
            <source>No single change is predicted to gain over 5%.</source>
            <translation>1つの変更で5%を超える効果が見込めるものはありません。</translation>
        </message>
    </context>
    <context>
        <name>SystemPromptPopover</name>
        <message>
            <source>System prompt</source>
            <translation>システムプロンプト</translation>
        </message>
        <message>
            <source>Instructions the model reads first, such as who it is and how to answer.</source>
            <translation>役割や答え方など、モデルが最初に読む指示です。</translation>
        </message>
        <message>
            <source>You are a helpful assistant that answers in one sentence.</source>
            <translation>あなたは1文で答える親切なアシスタントです。</translation>
        </message>
    </context>
    <context>
        <name>TelemetryHub</name>
        <message>
            <source>{0} loaded</source>
            <translation>{0}を読み込みました</translation>
        </message>
        <message>
            <source>The engine ended unexpectedly</source>
            <translation>エンジンが予期せず終了しました</translation>
        </message>
        <message>
            <source>The engine ended</source>
            <translation>エンジンが終了しました</translation>
        </message>
        <message>
            <source>The engine's clock jumped</source>
            <translation>エンジンの時計が飛びました</translation>
        </message>
        <message>
            <source>The session is no longer recorded: its file could not be written ({0}).</source>
            <translation>セッションの記録を停止しました。ファイルに書き込めませんでした（{0}）。</translation>
        </message>
    </context>
    <context>
        <name>TemplateCard</name>
        <message>
            <source>Prompt for each row</source>
            <translation>各行のプロンプト</translation>
        </message>
        <message>
            <source>Template</source>
            <translation>テンプレート</translation>
        </message>
        <message>
            <source>Click a column to insert it at the cursor; it stands for each row's own text.</source>
            <translation>列をクリックするとカーソル位置に挿入され、各行のテキストに置き換わります。</translation>
        </message>
        <message>
            <source>Column of pictures</source>
            <translation>画像の列</translation>
        </message>
        <message>
            <source>Its cells are paths of pictures, which begin in the file's folder, for a model that sees</source>
            <translation>セルはファイルのあるフォルダーを基準とする画像のパスで、画像を認識するモデル用です</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>システムプロンプト</translation>
        </message>
        <message>
            <source>System prompt: instructions for every row (optional)</source>
            <translation>システムプロンプト: 全行への指示（省略可）</translation>
        </message>
        <message>
            <source>Pictures: none</source>
            <translation>画像: なし</translation>
        </message>
        <message>
            <source>Pictures: {0}</source>
            <translation>画像: {0}</translation>
        </message>
        <message>
            <source>Insert column {0}</source>
            <translation>列{0}を挿入</translation>
        </message>
        <message>
            <source>Summarise in one line: {0}</source>
            <translation>1行で要約してください: {0}</translation>
        </message>
        <message>
            <source>Describe the picture.</source>
            <translation>画像を説明してください。</translation>
        </message>
        <message>
            <source>{0} reads text only, so rows with pictures get no answer: choose a model that sees.</source>
            <translation>{0} はテキストのみを読み取るため、画像のある行には回答が得られません。画像を認識するモデルを選択してください。</translation>
        </message>
        <message>
            <source>Write a prompt that includes a column.</source>
            <translation>列を含むプロンプトを書いてください。</translation>
        </message>
    </context>
    <context>
        <name>Thought</name>
        <message>
            <source>Copy what it thought</source>
            <translation>思考をコピー</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>思考</translation>
        </message>
        <message>
            <source>Fold what the model thought</source>
            <translation>モデルの思考を折りたたむ</translation>
        </message>
        <message>
            <source>Show what the model thought</source>
            <translation>モデルの思考を表示</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>展開中</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>折りたたみ中</translation>
        </message>
        <message>
            <source>What the model thought</source>
            <translation>モデルの思考</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>コピーしました</translation>
        </message>
    </context>
    <context>
        <name>TierRow</name>
        <message>
            <source>Hit rate of the last three minutes of decoding, 0 to 100%</source>
            <translation>直近3分間のデコードのヒット率、0～100%</translation>
        </message>
        <message>
            <source>{0} hits</source>
            <translation>ヒット {0}</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0}%</translation>
        </message>
        <message>
            <source>{0}% overall</source>
            <translation>全体で{0}%</translation>
        </message>
        <message>
            <source>{0} of {1} experts</source>
            <translation>{0} / {1}エキスパート</translation>
        </message>
        <message>
            <source>Since the model was loaded: {0} of {1} lookups</source>
            <translation>モデルの読み込み以降: {1}回の参照中{0}回</translation>
        </message>
    </context>
    <context>
        <name>Timeline</name>
        <message>
            <source>Lane</source>
            <translation>レーン</translation>
        </message>
        <message>
            <source>Last</source>
            <translation>最新</translation>
        </message>
        <message>
            <source>Average</source>
            <translation>平均</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>最大</translation>
        </message>
        <message>
            <source>{0}, out</source>
            <translation>{0}、送出</translation>
        </message>
        <message>
            <source>{0}, whole machine</source>
            <translation>{0}、マシン全体</translation>
        </message>
        <message>
            <source>Token of step {0}: {1}</source>
            <translation>ステップ{0}のトークン: {1}</translation>
        </message>
        <message>
            <source>{0} tokens at {1}/s</source>
            <translation>{0}トークン、{1}/秒</translation>
        </message>
        <message>
            <source>{0} hits per token</source>
            <translation>トークンあたりヒット{0}</translation>
        </message>
        <message>
            <source>{0} fetched</source>
            <translation>取得 {0}</translation>
        </message>
        <message>
            <source>{0} on the CPU</source>
            <translation>CPU {0}</translation>
        </message>
        <message>
            <source>layer {0}</source>
            <translation>レイヤー{0}</translation>
        </message>
        <message>
            <source>expert {0}</source>
            <translation>エキスパート{0}</translation>
        </message>
        <message>
            <source>{0} {1} tokens</source>
            <translation>{0} {1}トークン</translation>
        </message>
        <message>
            <source>This comes from a sensor or driver, not from the engine.</source>
            <translation>エンジンではなく、センサーまたはドライバーの値です。</translation>
        </message>
        <message>
            <source>sampling and bookkeeping</source>
            <translation>サンプリングと管理</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>エキスパート</translation>
        </message>
        <message>
            <source>attention</source>
            <translation>アテンション</translation>
        </message>
        <message>
            <source>hit</source>
            <translation>ヒット</translation>
        </message>
        <message>
            <source>fetched</source>
            <translation>取得</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>生成中</translation>
        </message>
        <message>
            <source>reading</source>
            <translation>読み取り中</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>待機中</translation>
        </message>
        <message>
            <source>in the background</source>
            <translation>バックグラウンド</translation>
        </message>
        <message>
            <source>written</source>
            <translation>生成</translation>
        </message>
        <message>
            <source>read</source>
            <translation>読み取り</translation>
        </message>
        <message>
            <source>of jobs</source>
            <translation>ジョブ</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>Move through time</source>
            <translation>時間を移動</translation>
        </message>
        <message>
            <source>Move by almost a full view</source>
            <translation>ほぼ1画面分移動</translation>
        </message>
        <message>
            <source>Zoom in, zoom out</source>
            <translation>拡大、縮小</translation>
        </message>
        <message>
            <source>Space</source>
            <translation>スペース</translation>
        </message>
        <message>
            <source>Freeze the view, or follow live</source>
            <translation>表示を固定、またはライブに追従</translation>
        </message>
        <message>
            <source>Home</source>
            <translation>Home</translation>
        </message>
        <message>
            <source>Go back to now</source>
            <translation>現在に戻る</translation>
        </message>
        <message>
            <source>Move the crosshair; with Shift, farther</source>
            <translation>十字線を移動（Shiftで大きく）</translation>
        </message>
        <message>
            <source>Select the previous or next token</source>
            <translation>前後のトークンを選択</translation>
        </message>
        <message>
            <source>Select a range</source>
            <translation>範囲を選択</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Enter</translation>
        </message>
        <message>
            <source>Zoom to the selected token or range</source>
            <translation>選択したトークンや範囲を拡大</translation>
        </message>
        <message>
            <source>Esc</source>
            <translation>Esc</translation>
        </message>
        <message>
            <source>Clear the selection</source>
            <translation>選択を解除</translation>
        </message>
        <message>
            <source>waiting for {0}</source>
            <translation>{0}を待機中</translation>
        </message>
        <message>
            <source>written at {0} ×{1}</source>
            <translation>{0}で生成 ×{1}</translation>
        </message>
        <message>
            <source>ceiling {0} GB/s</source>
            <translation>上限 {0} GB/s</translation>
        </message>
        <message>
            <source>token ticks</source>
            <translation>トークンの目盛り</translation>
        </message>
    </context>
    <context>
        <name>TimelineCard</name>
        <message>
            <source>Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.</source>
            <translation>ポイントで各レーンの値、ドラッグで平均、ホイールか↑ ↓で拡大縮小、← →で移動します。</translation>
        </message>
        <message>
            <source>Machine</source>
            <translation>マシン</translation>
        </message>
        <message>
            <source>Lanes of the machine's own sensors, below the engine's</source>
            <translation>エンジンのレーンの下に、マシンのセンサーのレーンを表示</translation>
        </message>
        <message>
            <source>Show the machine's sensors</source>
            <translation>マシンのセンサーを表示</translation>
        </message>
        <message>
            <source>Timeline as a table</source>
            <translation>タイムラインの表</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>表</translation>
        </message>
        <message>
            <source>The same lanes as numbers</source>
            <translation>同じレーンを数値で表示</translation>
        </message>
        <message>
            <source>Show the lanes as a table</source>
            <translation>レーンを表で表示</translation>
        </message>
    </context>
    <context>
        <name>TimelineStrip</name>
        <message>
            <source>Machine activity</source>
            <translation>マシンの動作</translation>
        </message>
        <message>
            <source>The last 20 seconds. Click for the Monitor.</source>
            <translation>直近20秒間。クリックでモニターを開きます。</translation>
        </message>
    </context>
    <context>
        <name>TimelineView</name>
        <message>
            <source>Timeline</source>
            <translation>タイムライン</translation>
        </message>
        <message>
            <source>Arrow keys move and zoom, Space freezes, Home returns to now, comma and full stop move the crosshair, square brackets step through tokens, Enter zooms to a token. The table has the same data as text.</source>
            <translation>矢印キーで移動と拡大縮小、スペースで固定、Homeで現在に戻り、コンマとピリオドで十字線を移動、角かっこでトークン間を移動、Enterでトークンを拡大します。表には同じデータがテキストで入っています。</translation>
        </message>
        <message>
            <source>now</source>
            <translation>現在</translation>
        </message>
    </context>
    <context>
        <name>TitleBar</name>
        <message>
            <source>Model: {0}</source>
            <translation>モデル: {0}</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>読み込みをキャンセル</translation>
        </message>
        <message>
            <source>Start a new chat</source>
            <translation>新しいチャットを始める</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>新しいチャット</translation>
        </message>
        <message>
            <source>Ctrl N</source>
            <translation>Ctrl N</translation>
        </message>
        <message>
            <source>Chats  Ctrl+K</source>
            <translation>チャット  Ctrl+K</translation>
        </message>
        <message>
            <source>List of chats</source>
            <translation>チャットの一覧</translation>
        </message>
        <message>
            <source>Double-click or press F2 to rename</source>
            <translation>ダブルクリックまたはF2で名前を変更</translation>
        </message>
        <message>
            <source>engine stopped</source>
            <translation>エンジン停止</translation>
        </message>
        <message>
            <source>engine not responding</source>
            <translation>エンジン応答なし</translation>
        </message>
        <message>
            <source>loading {0}</source>
            <translation>{0}を読み込み中</translation>
        </message>
        <message>
            <source>starting the engine</source>
            <translation>エンジンを起動中</translation>
        </message>
        <message>
            <source>no model loaded</source>
            <translation>モデル未読み込み</translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>チューニング済み</translation>
        </message>
        <message>
            <source>server not in the list</source>
            <translation>一覧にないサーバー</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>唯一のモデル</translation>
        </message>
        <message>
            <source>{0} · sent to {1}</source>
            <translation>{0} · {1}に送信</translation>
        </message>
        <message>
            <source>the model</source>
            <translation>モデル</translation>
        </message>
        <message>
            <source>{0} experts per layer, {1} per token</source>
            <translation>レイヤーあたり{0}エキスパート、トークンあたり{1}</translation>
        </message>
        <message>
            <source>Speed: of the last answer</source>
            <translation>速度: 直前の回答</translation>
        </message>
    </context>
    <context>
        <name>TokenCard</name>
        <message>
            <source>Per token</source>
            <translation>トークンあたり</translation>
        </message>
        <message>
            <source>What one token, a word or a part of one, costs on average. Of the experts that it used, a hit was already in the graphics card’s memory; a miss was fetched or computed on the processor.</source>
            <translation>1トークン（語またはその一部）の平均コストです。使われたエキスパートのうち、ヒットはすでにグラフィックスカードのメモリにあり、ミスは取得するかプロセッサで計算しました。</translation>
        </message>
        <message>
            <source>Experts used</source>
            <translation>使用エキスパート</translation>
        </message>
        <message>
            <source>in VRAM (hit)</source>
            <translation>VRAM内（ヒット）</translation>
        </message>
        <message>
            <source>fetched (miss)</source>
            <translation>取得（ミス）</translation>
        </message>
        <message>
            <source>on the CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>Time</source>
            <translation>時刻</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>GPUへ</translation>
        </message>
        <message>
            <source>From disk</source>
            <translation>ディスクから</translation>
        </message>
        <message>
            <source>Energy</source>
            <translation>エネルギー</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>{0} J</source>
            <translation>{0} J</translation>
        </message>
        <message>
            <source>not available here</source>
            <translation>ここでは取得できません</translation>
        </message>
        <message>
            <source>Neither a graphics card nor the processor reports its power here (NVML, RAPL).</source>
            <translation>ここではグラフィックスカードもプロセッサも電力を報告していません（NVML、RAPL）。</translation>
        </message>
        <message>
            <source>Power as graphics cards and processors report it, over the tokens' time; now {0} W.</source>
            <translation>グラフィックスカードとプロセッサが報告した電力を、トークンの時間で集計。現在{0} W。</translation>
        </message>
        <message>
            <source>Mean of the last {0} tokens</source>
            <translation>直近{0}トークンの平均</translation>
        </message>
        <message>
            <source>Mean of the last {0} batch tokens, {1} per step</source>
            <translation>直近{0}バッチトークンの平均、ステップあたり{1}</translation>
        </message>
    </context>
    <context>
        <name>TokenDialog</name>
        <message>
            <source>Save and download</source>
            <translation>保存してダウンロード</translation>
        </message>
        <message>
            <source>Access to {0}</source>
            <translation>{0}へのアクセス</translation>
        </message>
        <message>
            <source>1. Open the page of {0}, sign in, and accept what is asked there.</source>
            <translation>1. {0}のページを開いてサインインし、求められた内容に同意します。</translation>
        </message>
        <message>
            <source>Open {0}</source>
            <translation>{0}を開く</translation>
        </message>
        <message>
            <source>2. Create an access token (reading is enough) in your settings there, and paste it here.</source>
            <translation>2. そのサイトの設定でアクセストークン（読み取り権限で十分）を作成し、ここに貼り付けます。</translation>
        </message>
        <message>
            <source>Access token</source>
            <translation>アクセストークン</translation>
        </message>
        <message>
            <source>Its makers ask you to accept their terms first</source>
            <translation>開発元が先に利用条件への同意を求めています</translation>
        </message>
        <message>
            <source>It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone.</source>
            <translation>システムのキーリングに保存し（ない場合は今回の実行中のみ）、{0}にだけ送信します。</translation>
        </message>
    </context>
    <context>
        <name>TokenRows</name>
        <message>
            <source>Remove token</source>
            <translation>トークンを削除</translation>
        </message>
        <message>
            <source>Remove the token for {0}</source>
            <translation>{0}のトークンを削除</translation>
        </message>
    </context>
    <context>
        <name>ToolServerDialog</name>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>テスト</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>ツールのサーバーを追加</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>名前</translation>
        </message>
        <message>
            <source>for example files</source>
            <translation>例: files</translation>
        </message>
        <message>
            <source>Command</source>
            <translation>コマンド</translation>
        </message>
        <message>
            <source>or address</source>
            <translation>またはアドレス</translation>
        </message>
        <message>
            <source>Variables or headers</source>
            <translation>変数またはヘッダー</translation>
        </message>
        <message>
            <source>NAME=value, one on each line</source>
            <translation>NAME=値(1 行に 1 つ)</translation>
        </message>
        <message>
            <source>Values are kept in the system's keyring, or for this run only where there is none. ${NAME} in a value is read from the environment.</source>
            <translation>値はシステムのキーリングに保存します。ない場合は今回の実行中のみです。値の中の ${NAME} は環境変数から読み取ります。</translation>
        </message>
        <message>
            <source>or JSON</source>
            <translation>または JSON</translation>
        </message>
        <message>
            <source>The command has a quote that does not end: correct it.</source>
            <translation>コマンドの引用符が閉じていません。修正してください。</translation>
        </message>
        <message>
            <source>Each variable or header is NAME=value, on a line of its own.</source>
            <translation>変数やヘッダーは 1 行に 1 つ、NAME=値 の形で入力してください。</translation>
        </message>
        <message>
            <source>Enter the variables or headers again: they are kept for the old command or address alone.</source>
            <translation>変数またはヘッダーをもう一度入力してください。保存されているのは以前のコマンドまたはアドレス用だけです。</translation>
        </message>
        <message>
            <source>There is a server named {0}: choose another name.</source>
            <translation>{0} という名前のサーバーがあります。別の名前にしてください。</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>起動しています…</translation>
        </message>
    </context>
    <context>
        <name>Tools</name>
        <message numerus="yes">
            <source>It answers: {0} tools.</source>
            <translation>
                <numerusform>応答がありました: ツール {0} 個。</numerusform>
            </translation>
        </message>
        <message>
            <source>not allowed</source>
            <translation>許可されませんでした</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>失敗</translation>
        </message>
        <message>
            <source>done in {0}</source>
            <translation>{0} で完了</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>停止</translation>
        </message>
        <message>
            <source>running…</source>
            <translation>実行中…</translation>
        </message>
        <message>
            <source>waits for you</source>
            <translation>確認待ち</translation>
        </message>
    </context>
    <context>
        <name>ToolsCard</name>
        <message>
            <source>Tools</source>
            <translation>ツール</translation>
        </message>
        <message>
            <source>Calculator</source>
            <translation>電卓</translation>
        </message>
        <message>
            <source>Computes what models get wrong. Runs without asking.</source>
            <translation>モデルが間違えやすい計算をします。確認なしで実行されます。</translation>
        </message>
        <message>
            <source>Clock</source>
            <translation>時計</translation>
        </message>
        <message>
            <source>Tells the date and the time. Runs without asking.</source>
            <translation>日付と時刻を伝えます。確認なしで実行されます。</translation>
        </message>
        <message>
            <source>Read a file</source>
            <translation>ファイルを読む</translation>
        </message>
        <message>
            <source>Of folders that are attached to the chat.</source>
            <translation>チャットに添付したフォルダーのファイルです。</translation>
        </message>
        <message>
            <source>Run a batch</source>
            <translation>バッチを実行</translation>
        </message>
        <message>
            <source>Starts a job that answers a prompt for each of many rows.</source>
            <translation>多数の行それぞれについてプロンプトに答えるジョブを開始します。</translation>
        </message>
        <message>
            <source>Search documents</source>
            <translation>文書を検索</translation>
        </message>
        <message>
            <source>Those that are attached to the chat. Runs without asking.</source>
            <translation>チャットに添付した文書です。確認なしで実行されます。</translation>
        </message>
        <message>
            <source>Offered to the model in chats where the switch at the message box is on. Before a tool runs you are asked, unless you allowed it.</source>
            <translation>入力欄のスイッチがオンのチャットで、モデルに提供されます。許可済みでない限り、ツールの実行前に確認します。</translation>
        </message>
        <message>
            <source>Ask again for all</source>
            <translation>すべて再び確認する</translation>
        </message>
        <message>
            <source>Always allowed</source>
            <translation>常に許可するもの</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>追加…</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>ツールのサーバーを追加</translation>
        </message>
        <message>
            <source>Programs or addresses that bring tools by the Model Context Protocol, such as a web search. A program runs on this PC with your rights: add only what you trust.</source>
            <translation>ウェブ検索など、Model Context Protocol でツールを提供するプログラムやアドレスです。プログラムはこの PC であなたの権限で動きます。信頼できるものだけを追加してください。</translation>
        </message>
        <message>
            <source>MCP servers</source>
            <translation>MCP サーバー</translation>
        </message>
        <message>
            <source>No tool yet.</source>
            <translation>まだありません。</translation>
        </message>
        <message>
            <source>Offer the tools of {0}</source>
            <translation>{0} のツールを提供</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>編集…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>{0} を編集</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>削除</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>{0} を削除</translation>
        </message>
        <message>
            <source>Its variables or headers are known for this run only: this system has no keyring.</source>
            <translation>変数またはヘッダーは今回の実行中のみ有効です。このシステムにはキーリングがありません。</translation>
        </message>
        <message>
            <source>Its tools are asked for when a chat needs them.</source>
            <translation>チャットで必要になったときにツールを問い合わせます。</translation>
        </message>
        <message>
            <source>It offers no tools; its prompts and resources are not used here.</source>
            <translation>ツールはありません。プロンプトとリソースはここでは使いません。</translation>
        </message>
        <message numerus="yes">
            <source>{0} tools: {1}</source>
            <translation>
                <numerusform>ツール {0} 個: {1}</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Transcript</name>
        <message>
            <source>Conversation</source>
            <translation>会話</translation>
        </message>
        <message>
            <source>Jump to the latest</source>
            <translation>最新へ移動</translation>
        </message>
    </context>
    <context>
        <name>Tray</name>
        <message>
            <source>Switchyard is still running</source>
            <translation>Switchyardは動作を続けています</translation>
        </message>
        <message>
            <source>Its window is hidden; the icon here opens it, asks a question, or quits.</source>
            <translation>ウィンドウは隠れています。このアイコンから、開く、質問する、終了する操作ができます。</translation>
        </message>
        <message>
            <source>Quick question…</source>
            <translation>クイック質問…</translation>
        </message>
        <message>
            <source>Open Switchyard</source>
            <translation>Switchyardを開く</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>終了</translation>
        </message>
    </context>
    <context>
        <name>Tune</name>
        <message>
            <source>measured on this machine</source>
            <translation>このマシンで測定</translation>
        </message>
        <message>
            <source>reported by the driver or the system</source>
            <translation>ドライバーまたはシステムの値</translation>
        </message>
        <message>
            <source>assumed, from data sheets</source>
            <translation>仕様書からの仮定</translation>
        </message>
        <message>
            <source>about {0}</source>
            <translation>約{0}</translation>
        </message>
        <message>
            <source>just measured</source>
            <translation>測定直後</translation>
        </message>
        <message>
            <source>The CPU computes everything.</source>
            <translation>CPUがすべて計算します。</translation>
        </message>
        <message>
            <source>{0} is part of the processor</source>
            <translation>{0}はプロセッサに内蔵されています</translation>
        </message>
        <message>
            <source>No graphics card</source>
            <translation>グラフィックスカードなし</translation>
        </message>
        <message>
            <source>not used by the engine</source>
            <translation>エンジンでは未使用</translation>
        </message>
        <message>
            <source>reported by the engine</source>
            <translation>エンジンの報告</translation>
        </message>
        <message>
            <source>and {0} more: {1}</source>
            <translation>ほか{0}: {1}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>{0}, emulated in RAM</source>
            <translation>{0}、RAMでエミュレート</translation>
        </message>
        <message>
            <source>{0}, {1} free</source>
            <translation>{0}、空き{1}</translation>
        </message>
        <message>
            <source>driver {0}</source>
            <translation>ドライバー {0}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1コア</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0}コア</numerusform>
            </translation>
        </message>
        <message>
            <source>best with 1 thread</source>
            <translation>最良は1スレッド</translation>
        </message>
        <message numerus="yes">
            <source>best with {0} threads</source>
            <translation>
                <numerusform>最良は{0}スレッド</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>the container's limit</source>
            <translation>コンテナーの上限</translation>
        </message>
        <message>
            <source>the limit set for WSL</source>
            <translation>WSLに設定された上限</translation>
        </message>
        <message>
            <source>pinnable: {0}</source>
            <translation>固定可能: {0}</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>It does not respond.</source>
            <translation>応答しません。</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>ディスク</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>空き{0}</translation>
        </message>
        <message>
            <source>hard disk</source>
            <translation>ハードディスク</translation>
        </message>
        <message>
            <source>network share</source>
            <translation>ネットワーク共有</translation>
        </message>
        <message>
            <source>in memory</source>
            <translation>メモリ内</translation>
        </message>
        <message>
            <source>disk of the host</source>
            <translation>ホストのディスク</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>ディスク</translation>
        </message>
        <message>
            <source>{0} up</source>
            <translation>上り{0}</translation>
        </message>
        <message>
            <source>{0} down</source>
            <translation>下り{0}</translation>
        </message>
        <message>
            <source>reading RAM</source>
            <translation>RAMの読み取り</translation>
        </message>
        <message>
            <source>Looking up the hardware</source>
            <translation>ハードウェアを調べています</translation>
        </message>
        <message>
            <source>Waiting for other programs, which use {0} of the CPU</source>
            <translation>CPUの{0}を使っているほかのプログラムを待っています</translation>
        </message>
        <message>
            <source>Measuring {0}</source>
            <translation>{0}を測定しています</translation>
        </message>
        <message>
            <source>Measuring</source>
            <translation>測定しています</translation>
        </message>
        <message>
            <source>Planning</source>
            <translation>計画しています</translation>
        </message>
        <message>
            <source>Loading: {0}</source>
            <translation>読み込み中: {0}</translation>
        </message>
        <message>
            <source>Timing real tokens: {0}</source>
            <translation>実際のトークンで計測中: {0}</translation>
        </message>
        <message>
            <source>Loading {0} again</source>
            <translation>{0}を再び読み込んでいます</translation>
        </message>
        <message>
            <source>Reading RAM</source>
            <translation>RAMの読み取り</translation>
        </message>
        <message>
            <source>CPU arithmetic</source>
            <translation>CPUの演算</translation>
        </message>
        <message>
            <source>Experts on the CPU</source>
            <translation>CPUでのエキスパート</translation>
        </message>
        <message>
            <source>GPU arithmetic</source>
            <translation>GPUの演算</translation>
        </message>
        <message>
            <source>Reading VRAM</source>
            <translation>VRAMの読み取り</translation>
        </message>
        <message>
            <source>Experts on the GPU</source>
            <translation>GPUでのエキスパート</translation>
        </message>
        <message>
            <source>RAM to the card</source>
            <translation>RAMからカードへ</translation>
        </message>
        <message>
            <source>Card to RAM</source>
            <translation>カードからRAMへ</translation>
        </message>
        <message>
            <source>Reading the disk</source>
            <translation>ディスクの読み取り</translation>
        </message>
        <message>
            <source>Decoding</source>
            <translation>デコード</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} トークン/秒</translation>
        </message>
        <message>
            <source>About {0} tokens/s</source>
            <translation>約{0} トークン/秒</translation>
        </message>
        <message>
            <source>predicted, {0} to {1} on an idle machine; first token after about {2} s</source>
            <translation>予測。空いたマシンで{0}～{1}、最初のトークンまで約{2}秒</translation>
        </message>
        <message>
            <source>measured with real tokens on {0}</source>
            <translation>{0}に実際のトークンで計測</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too high: it adds up what memory and processor can do, and leaves out the engine's overhead.</source>
            <translation>{0}: こちらの値をお使いください。予測は{1}で、{2}%高めでした。メモリとプロセッサの能力を足し合わせ、エンジンの負荷を含まないためです。</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too low: it is based on memory and processor measured one at a time, and together they are faster.</source>
            <translation>{0}: こちらの値をお使いください。予測は{1}で、{2}%低めでした。別々に測定したメモリとプロセッサに基づき、実際は同時のほうが速いためです。</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1スレッド</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0}スレッド</numerusform>
            </translation>
        </message>
        <message>
            <source>all experts on the card</source>
            <translation>全エキスパートをカードに</translation>
        </message>
        <message>
            <source>{0} expert slots</source>
            <translation>エキスパート{0}スロット</translation>
        </message>
        <message>
            <source>about {0}% hits</source>
            <translation>ヒット約{0}%</translation>
        </message>
        <message>
            <source>Not enough disk space: {0} of experts need it, and {1} are free.</source>
            <translation>ディスクの空きが足りません。エキスパートに{0}必要ですが、空きは{1}です。</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>experts read on demand</source>
            <translation>エキスパートは必要時に読み込み</translation>
        </message>
        <message>
            <source>layers read for each token</source>
            <translation>レイヤーはトークンごとに読み込み</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>スターターモデル</translation>
        </message>
    </context>
    <context>
        <name>TuneCards</name>
        <message>
            <source>Your machine</source>
            <translation>あなたのマシン</translation>
        </message>
        <message>
            <source>Wider links have more bandwidth; hollow ones are assumed.</source>
            <translation>太い線ほど帯域が広く、中抜きの線は仮定です。</translation>
        </message>
        <message>
            <source>Looking up the hardware…</source>
            <translation>ハードウェアを調べています…</translation>
        </message>
        <message>
            <source>Where to compute</source>
            <translation>計算する場所</translation>
        </message>
    </context>
    <context>
        <name>TunePage</name>
        <message>
            <source>Tune</source>
            <translation>チューニング</translation>
        </message>
        <message>
            <source>What if…</source>
            <translation>もしも…</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>レポートをコピー</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Cancel tuning</source>
            <translation>チューニングをキャンセル</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0} Tune again.</source>
            <translation>前回のチューニングからハードウェアが変わりました。{0} もう一度チューニングしてください。</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>スターターモデル</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>コピーしました</translation>
        </message>
    </context>
    <context>
        <name>UnsavedTextGuard</name>
        <message>
            <source>The latest messages are not saved.</source>
            <translation>最新のメッセージが保存されていません。</translation>
        </message>
        <message>
            <source>If you close the window now, they are lost.</source>
            <translation>今ウィンドウを閉じると失われます。</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>ウィンドウを開いたままにする</translation>
        </message>
        <message>
            <source>Close and lose them</source>
            <translation>閉じて破棄</translation>
        </message>
    </context>
    <context>
        <name>Updates</name>
        <message>
            <source>The installation was stopped. Nothing has changed: try again.</source>
            <translation>インストールが中断されました。何も変わっていません。もう一度お試しください。</translation>
        </message>
    </context>
    <context>
        <name>UpdatesCard</name>
        <message>
            <source>Check now</source>
            <translation>今すぐ確認</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>ダウンロード</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Go back</source>
            <translation>元のバージョンに戻す</translation>
        </message>
        <message>
            <source>Previous version</source>
            <translation>前のバージョン</translation>
        </message>
        <message>
            <source>the official one</source>
            <translation>公式サーバー</translation>
        </message>
        <message>
            <source>Where newer versions come from. Only versions signed by Switchyard's developers are installed.</source>
            <translation>新しいバージョンの入手元です。Switchyardの開発者が署名したものだけがインストールされます。</translation>
        </message>
        <message>
            <source>Update server</source>
            <translation>更新サーバー</translation>
        </message>
        <message>
            <source>{0} is kept. Going back takes effect at the next start.</source>
            <translation>{0}を保持しています。戻すと次回の起動時に反映されます。</translation>
        </message>
        <message>
            <source>There is none.</source>
            <translation>ありません。</translation>
        </message>
        <message>
            <source>{0} is available ({1}).</source>
            <translation>{0}が利用できます（{1}）。</translation>
        </message>
        <message>
            <source>Not checked yet.</source>
            <translation>未確認です。</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>確認中…</translation>
        </message>
        <message>
            <source>This is the newest version.</source>
            <translation>最新のバージョンです。</translation>
        </message>
        <message>
            <source>Downloading {0}…</source>
            <translation>{0}をダウンロードしています…</translation>
        </message>
        <message>
            <source>{0} will be installed when answers and jobs are done.</source>
            <translation>{0}は、回答とジョブが終わり次第インストールされます。</translation>
        </message>
        <message>
            <source>Installing and testing {0}…</source>
            <translation>{0}をインストールしてテストしています…</translation>
        </message>
        <message>
            <source>Restart Switchyard to use the other version.</source>
            <translation>別のバージョンを使うにはSwitchyardを再起動してください。</translation>
        </message>
        <message>
            <source>Nothing has changed.</source>
            <translation>何も変わっていません。</translation>
        </message>
    </context>
    <context>
        <name>UserMessage</name>
        <message>
            <source>Copy</source>
            <translation>コピー</translation>
        </message>
        <message>
            <source>Edit the message</source>
            <translation>メッセージを編集</translation>
        </message>
        <message>
            <source>Ask this of every row of a file</source>
            <translation>ファイルの各行にこれを質問</translation>
        </message>
        <message>
            <source>Delete this message</source>
            <translation>このメッセージを削除</translation>
        </message>
        <message>
            <source>You: {0}</source>
            <translation>あなた: {0}</translation>
        </message>
        <message>
            <source>Edit message</source>
            <translation>メッセージを編集</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>キャンセル</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>保存</translation>
        </message>
        <message>
            <source>Changes the message; the answers after it stay.</source>
            <translation>メッセージを変更します。以降の回答は残ります。</translation>
        </message>
        <message>
            <source>Send as new version</source>
            <translation>新しい版で送信</translation>
        </message>
    </context>
    <context>
        <name>VersionSwitch</name>
        <message>
            <source>Earlier version</source>
            <translation>前の版</translation>
        </message>
        <message>
            <source>Later version</source>
            <translation>次の版</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
    </context>
    <context>
        <name>Versions</name>
        <message>
            <source>You started Switchyard {0}, and this window is {1}: close it, then start the other.</source>
            <translation>Switchyard {0}を起動しましたが、このウィンドウは{1}です。これを閉じてから、もう一方を起動してください。</translation>
        </message>
    </context>
    <context>
        <name>WhatIfCard</name>
        <message>
            <source>What if this machine had…</source>
            <translation>もしこのマシンに次のものがあったら…</translation>
        </message>
        <message>
            <source>A few letters, such as 4090</source>
            <translation>数文字入力（例: 4090）</translation>
        </message>
        <message>
            <source>Graphics card as it is</source>
            <translation>現在のカード</translation>
        </message>
        <message>
            <source> GB of VRAM</source>
            <translation> GBのVRAM</translation>
        </message>
        <message>
            <source>VRAM as it is</source>
            <translation>現在のVRAM</translation>
        </message>
        <message>
            <source> GB of RAM</source>
            <translation> GBのRAM</translation>
        </message>
        <message>
            <source>RAM as it is</source>
            <translation>現在のRAM</translation>
        </message>
        <message>
            <source> GB/s to the card</source>
            <translation> GB/s（カード接続）</translation>
        </message>
        <message>
            <source>Link as it is</source>
            <translation>現在の接続</translation>
        </message>
        <message>
            <source> GB/s from disk</source>
            <translation> GB/s（ディスク）</translation>
        </message>
        <message>
            <source>Disk as it is</source>
            <translation>現在のディスク</translation>
        </message>
        <message>
            <source>Graphics card</source>
            <translation>グラフィックスカード</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Link to the card</source>
            <translation>カードとの接続</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>ディスク</translation>
        </message>
        <message>
            <source>Reset</source>
            <translation>リセット</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>閉じる</translation>
        </message>
        <message>
            <source>Change something above to see its effect.</source>
            <translation>上の項目を変えると効果が表示されます。</translation>
        </message>
        <message>
            <source>The link needs a graphics card: choose one first.</source>
            <translation>接続を変えるにはグラフィックスカードが必要です。先に選んでください。</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>計画しています…</translation>
        </message>
        <message>
            <source>It would fit, at about {0} tokens/s</source>
            <translation>収まり、約{0} トークン/秒になります</translation>
        </message>
        <message>
            <source>About {1} tokens/s: as fast as now</source>
            <translation>約{1} トークン/秒: 現在と同じ速さです</translation>
        </message>
        <message>
            <source>{0} tokens/s now, measured → about {1} predicted, {2} times as fast</source>
            <translation>現在{0} トークン/秒（実測）→ 予測 約{1}、{2}倍の速さ</translation>
        </message>
        <message>
            <source>About {0} → about {1} tokens/s, {2} times as fast</source>
            <translation>約{0} → 約{1} トークン/秒、{2}倍の速さ</translation>
        </message>
    </context>
    <context>
        <name>WorkLine</name>
        <message>
            <source>Stop</source>
            <translation>停止</translation>
        </message>
    </context>
    <context>
        <name>WorkerProcess</name>
        <message>
            <source>The engine sent an invalid message: {0}</source>
            <translation>エンジンが無効なメッセージを送信しました: {0}</translation>
        </message>
        <message>
            <source>The engine could not be started ({0}): reinstall Switchyard.</source>
            <translation>エンジンを起動できませんでした（{0}）。Switchyardを再インストールしてください。</translation>
        </message>
    </context>
    <context>
        <name>_GpuRow</name>
        <message>
            <source>Busy</source>
            <translation>使用率</translation>
        </message>
        <message>
            <source>VRAM: ours; hatched: other programs</source>
            <translation>VRAM: 当アプリ、斜線: ほかのプログラム</translation>
        </message>
        <message>
            <source>GPU {0}</source>
            <translation>GPU {0}</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>使用率{0}%</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} / {1}</translation>
        </message>
        <message>
            <source>not responding</source>
            <translation>応答なし</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>memory {0} GHz</source>
            <translation>メモリ {0} GHz</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>PCIe {0} in, {1} out GB/s</source>
            <translation>PCIe 受信{0}、送信{1} GB/s</translation>
        </message>
        <message>
            <source>slowed by {0}</source>
            <translation>減速の原因: {0}</translation>
        </message>
    </context>
</TS>
